// The limits of the machine that a kernel of this library can come near to,
// by micro-benchmark: arithmetic in registers alone, and reading of memory
// alone, with as many threads as PyTorch uses now. No operators: plain C
// functions, which the benchmarks call through ctypes.
//
// Arithmetic is done in the vectors of the library's own instruction set, in
// kAccumulators independent accumulators, so that no instruction depends on the
// one before.
// The best of some repetitions counts: whatever disturbs a measurement makes it
// slower, never faster.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "cpu/int4/arithmetic.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/dot_products.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "host/compiler.h"
#include "host/tensor.h"

namespace pkg::cpu {
namespace {

using simd::Vector;
using Clock = std::chrono::steady_clock;

// Enough for a latency of 4 cycles and two operations a cycle; with the
// operands they fit 16 registers.
constexpr int kAccumulators = 12;
constexpr double kLeastSeconds = 1e-3;

// The prefetchers of a core follow several streams at once, and one stream
// alone does not keep enough cache lines on their way.
constexpr int kStreams = 4;
constexpr int64_t kLine = 64;

// The compiler no longer knows this value, and has to have it in a register.
template <class V>
inline void forget(V& value) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+v"(value));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(value));
#else
  __asm__ volatile("" : "+m"(value));
#endif
}

// Each arithmetic adds the product of two operands to a sum, as the kernels do.
template <class T>
struct MultiplyAdd {
  using Register = Vector<T>;
  static constexpr int kOperations = 2;
  static constexpr T kOperand = 0.5;

  static Register step(Register sum, Register& a, Register b) {
    forget(a);  // or the product would be calculated once
    return sum + a * b;
  }
};

#if defined(PKG_HAS_TILES)
// Tiles of 16 rows and 16 columns, 64 bytes deep.
struct Bfloat16Limit {};
struct Int8Limit {};
#else
#if defined(PKG_HAS_BFLOAT16_DOT)
struct Bfloat16Limit {
  using Register = Vector<uint32_t>;
  static constexpr int kOperations = 4;
  static constexpr uint32_t kOperand = 0x3F003F00;  // a pair of 0.5

  static Register step(Register sum, Register a, Register b) {
    return std::bit_cast<Register>(
        simd::dot_bfloat16(a, b, std::bit_cast<Vector<float>>(sum)));
  }
};
#else
using Bfloat16Limit = MultiplyAdd<float>;  // converted
#endif

// Four products a lane where the processor has them, else two of int16.
struct Int8Limit {
  using Register = Vector<uint32_t>;
  static constexpr uint32_t kOperand = 0x01020304;
#if defined(PKG_HAS_BYTE_DOT)
  static constexpr int kOperations = 8;
  static Register step(Register sum, Register a, Register b) {
    return std::bit_cast<Register>(
        simd::dot_bytes(a, b, std::bit_cast<Vector<int32_t>>(sum)));
  }
#elif defined(__SSE2__)
  // The sum is what is multiplied: measured faster than independent products.
  static constexpr int kOperations = 4;
  static Register step(Register sum, Register a, Register b) {
#if defined(__AVX512BW__)
    return b + std::bit_cast<Register>(_mm512_madd_epi16(
                   std::bit_cast<__m512i>(sum), std::bit_cast<__m512i>(a)));
#elif defined(__AVX2__)
    return b + std::bit_cast<Register>(_mm256_madd_epi16(
                   std::bit_cast<__m256i>(sum), std::bit_cast<__m256i>(a)));
#else
    return b + std::bit_cast<Register>(_mm_madd_epi16(
                   std::bit_cast<__m128i>(sum), std::bit_cast<__m128i>(a)));
#endif
  }
#else
  static constexpr int kOperations = 2;
  static Register step(Register sum, Register& a, Register b) {
    forget(a);
    return sum + a * b;
  }
#endif
};
#endif

// As kernels with weights of four bits multiply, which without VNNI takes fewer
// instructions than int8 by int8. Two products, so that they may be added in
// int16 first; the second one is a square, or it would be calculated once.
struct Int4Products {
  using Register = Vector<uint32_t>;
  static constexpr int kOperations = 16;
  static constexpr uint32_t kOperand = 0x01020304;

  static Register step(Register sum, Register& a, Register b) {
    forget(a);
    return std::bit_cast<Register>(Int4Quads::multiply_add(
        a, b, a, a, std::bit_cast<Vector<int32_t>>(sum)));
  }
};

// Not inlined: one code, with no register lost to what surrounds it.
template <class Arithmetic>
[[gnu::noinline]] void calculate(int64_t steps) {
  using Register = typename Arithmetic::Register;
  Register a = simd::broadcast(Arithmetic::kOperand);
  Register b = a;
  forget(b);
  std::array<Register, kAccumulators> sums{};
  for (Register& sum : sums) {
    forget(sum);  // or all would be the same one
  }
  for (int64_t step = 0; step < steps; ++step) {
    for (Register& sum : sums) {
      sum = Arithmetic::step(sum, a, b);
    }
  }
  for (Register& sum : sums) {
    forget(sum);
  }
}

template <class Arithmetic>
constexpr double kStepOperations =
    Arithmetic::kOperations * kAccumulators *
    double{sizeof(typename Arithmetic::Register)} /
    double{sizeof(Arithmetic::kOperand)};

#if defined(PKG_HAS_TILES)
// Calls body() so many times with all tiles at their largest, and zero.
template <class Body>
void with_tiles(int64_t steps, const Body& body) {
  detail::TileShapes shapes;
  std::fill_n(shapes.rows, 8, uint8_t{16});
  std::fill_n(shapes.row_bytes, 8, uint16_t{64});
  detail::load_shapes(shapes);
  for (int64_t step = 0; step < steps; ++step) {
    body();
  }
  _tile_release();
}
template <>
[[gnu::noinline]] void calculate<Bfloat16Limit>(int64_t steps) {
  with_tiles(steps, [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  });
}
template <>
[[gnu::noinline]] void calculate<Int8Limit>(int64_t steps) {
  with_tiles(steps, [] {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  });
}
template <>
constexpr double kStepOperations<Bfloat16Limit> = 4 * 2.0 * 16 * 16 * 32;
template <>
constexpr double kStepOperations<Int8Limit> = 4 * 2.0 * 16 * 16 * 64;
#endif

// From the first thread's start to the last one's end.
template <class Body>
double seconds_of(int64_t threads, const Body& body) {
  struct Span {
    Clock::time_point begin, end;
  };
  std::vector<Span> spans(static_cast<size_t>(threads));
  parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      Span& span = spans[static_cast<size_t>(thread)];
      span.begin = Clock::now();
      body(thread);
      span.end = Clock::now();
    }
  });
  const auto first = std::ranges::min(spans, {}, &Span::begin).begin;
  const auto last = std::ranges::max(spans, {}, &Span::end).end;
  return std::chrono::duration<double>(last - first).count();
}

template <class Body>
double best_seconds(int repetitions, int64_t threads, const Body& body) {
  double best = std::numeric_limits<double>::infinity();
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    best = std::min(best, seconds_of(threads, body));
  }
  return best;
}

template <class Arithmetic>
double operations_a_second(int repetitions) {
  const int64_t threads = num_threads();
  int64_t steps = 1 << 10;
  const auto body = [&](int64_t) { calculate<Arithmetic>(steps); };
  // On this thread alone: that others start late must not end the search.
  while (best_seconds(3, 1, body) < kLeastSeconds) {
    steps *= 2;
  }
  const double operations =
      kStepOperations<Arithmetic> * static_cast<double>(steps * threads);
  return operations / best_seconds(repetitions, threads, body);
}

void read(const std::byte* memory, int64_t stream_bytes) {
  std::array<Vector<uint64_t>, kStreams> seen{};
  for (int64_t offset = 0; offset < stream_bytes; offset += kLine) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const std::byte* line = memory + stream * stream_bytes + offset;
      for (int64_t at = 0; at < kLine; at += simd::kVectorBytes) {
        Vector<uint64_t> part;
        std::memcpy(&part, line + at, sizeof(part));
        seen[static_cast<size_t>(stream)] |= part;
      }
    }
  }
  for (auto& stream : seen) {
    forget(stream);
  }
}

}  // namespace
}  // namespace pkg::cpu

// Operations a second of all threads, a multiplication and an addition counted
// as two, in the arithmetic that products of this dtype are done in: "float64",
// "float32", "bfloat16", "int8", or "int4" for int8 by int4. The best of some
// repetitions. Zero for any other dtype.
extern "C" PKG_EXPORT double pkg_arithmetic_limit(const char* dtype,
                                                  int32_t repetitions) {
  using namespace pkg::cpu;
  const std::string_view name(dtype);
  const int n = repetitions;
  try {
    return name == "float64"    ? operations_a_second<MultiplyAdd<double>>(n)
           : name == "float32"  ? operations_a_second<MultiplyAdd<float>>(n)
           : name == "bfloat16" ? operations_a_second<Bfloat16Limit>(n)
           : name == "int8"     ? operations_a_second<Int8Limit>(n)
           : name == "int4"     ? operations_a_second<Int4Products>(n)
                                : 0.0;
  } catch (...) {
    return 0.0;
  }
}

// Bytes a second that all threads together read of this memory, which should be
// several times larger than the caches; the best of some readings. Zero where
// there is too little of it.
extern "C" PKG_EXPORT double pkg_reading_limit(const void* memory,
                                               int64_t bytes,
                                               int32_t readings) {
  using namespace pkg::cpu;
  try {
    const int64_t threads = num_threads();
    const int64_t stream_bytes = bytes / (threads * kStreams * kLine) * kLine;
    const int64_t thread_bytes = stream_bytes * kStreams;
    const auto* first = static_cast<const std::byte*>(memory);
    const double seconds = best_seconds(readings, threads, [&](int64_t thread) {
      read(first + thread * thread_bytes, stream_bytes);
    });
    return static_cast<double>(thread_bytes * threads) / seconds;
  } catch (...) {
    return 0.0;
  }
}
