// quantize_rowwise: each row divided by a scale of its own
// (quantize_rowwise_scale.h) and rounded to int8, or to int4 two to a byte. A
// first pass over the row finds the largest magnitudes, a second one, from the
// cache, divides and rounds; bound by reading the input.
#include "quantize_rowwise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>

#include "cpu/pointwise/pointwise.h"
#include "cpu/pointwise/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"
#include "quantize_rowwise_scale.h"

namespace pkg::cpu {
namespace {

using simd::Vector;

// As wide as a float or a double.
template <class Number>
using IntegerOf =
    std::conditional_t<sizeof(Number) == sizeof(int32_t), int32_t, int64_t>;

// The largest magnitudes of either sign, zero where there are none.
template <class Number>
struct Magnitudes {
  Number positive;
  Number negative;
};

// Magnitudes as integers are in order, NaN beyond all, and values of the other
// sign below zero. Both NaN where a value is NaN.
template <class T>
Magnitudes<simd::Compute<T>> largest_magnitudes(const T* row, int64_t count) {
  using Number = simd::Compute<T>;
  using Bits = IntegerOf<Number>;
  constexpr int kLanes = simd::kLanes<Number>;
  constexpr int kChains = 4;
  constexpr Bits kSign = std::numeric_limits<Bits>::min();
  Vector<Bits> positive[kChains] = {};
  Vector<Bits> negative[kChains] = {};
  const auto see = [&](int chain,
                       Vector<Number> value) __attribute__((always_inline)) {
    const auto bits = std::bit_cast<Vector<Bits>>(value);
    const Vector<Bits> turned = bits ^ kSign;
    positive[chain] = bits > positive[chain] ? bits : positive[chain];
    negative[chain] = turned > negative[chain] ? turned : negative[chain];
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      see(chain, simd::load(row + i + chain * kLanes));
    }
  }
  for (; i < count; i += kLanes) {
    see(0, simd::load_up_to(row + i, count - i));
  }
  const auto largest = [](Vector<Bits>(&chains)[kChains]) {
    for (int i = 1; i < kChains; ++i) {
      chains[0] = chains[i] > chains[0] ? chains[i] : chains[0];
    }
    return simd::reduce_max_or_nan(std::bit_cast<Vector<Number>>(chains[0]));
  };
  Magnitudes<Number> found{largest(positive), largest(negative)};
  if (std::isnan(found.positive) || std::isnan(found.negative)) {
    found.positive = found.negative = std::numeric_limits<Number>::quiet_NaN();
  }
  return found;
}

// How values are divided by a scale: with the reciprocal in half the time on
// Zen 4 and, by the tables of instructions, a third on Intel.
enum class Division { ByProcessor, ByReciprocal };

template <class Number>
Division division_by([[maybe_unused]] Number scale) {
#if defined(__FMA__) || defined(__aarch64__)
  if (divides_by_reciprocal(scale)) {
    return Division::ByReciprocal;
  }
#endif
  return Division::ByProcessor;
}

template <class Number>
struct Quantizer {
  Number scale;
  Number least;
  Number most;
  Number reciprocal = 1 / scale;

  // value / scale, rounded to the nearest integer, to the even one of two.
  template <Division division>
  auto operator()(Vector<Number> value) const {
    using Bits = IntegerOf<Number>;
    // Adding it leaves no bits for fractions, and the integer in the low ones.
    constexpr Number kIntegers = sizeof(Number) == 4 ? 0x1.8p23 : 0x1.8p52;
    Vector<Number> y;
    if constexpr (division == Division::ByProcessor) {
      y = value / scale;
    } else {
      y = value * reciprocal;
      y = (value - y * scale) * reciprocal + y;
      y = (value - y * scale) * reciprocal + y;
    }
    y = y > most ? simd::broadcast(most) : y;
    y = y < least ? simd::broadcast(least) : y;
    return std::bit_cast<Vector<Bits>>(y + kIntegers) -
           std::bit_cast<Bits>(kIntegers);
  }
};

// Four registers of integers from -128 to 127 as bytes. GCC 12 narrows from 32
// bits to 8 lane by lane where there is no instruction for it.
template <class Integer>
void store_bytes(int8_t* to, const Vector<Integer> (&from)[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(Integer) == 4) {
    const auto at = [&](int i) { return std::bit_cast<__m256i>(from[i]); };
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(at(0), at(1)),
                                             _mm256_packs_epi32(at(2), at(3)));
    // Packed within halves: words of each register's lower lanes come first.
    const __m256i in_order = _mm256_permutevar8x32_epi32(
        bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), in_order);
  }
#elif defined(__SSE4_1__) && !defined(__AVX2__)
  if constexpr (sizeof(Integer) == 4) {
    const auto at = [&](int i) { return std::bit_cast<__m128i>(from[i]); };
    return _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                            _mm_packs_epi16(_mm_packs_epi32(at(0), at(1)),
                                            _mm_packs_epi32(at(2), at(3))));
  }
#endif
  constexpr int kLanes = simd::kLanes<Integer>;
  using Bytes = typename simd::VectorOf<int8_t, kLanes>::type;
  for (int i = 0; i < 4; ++i) {
    const auto bytes = __builtin_convertvector(from[i], Bytes);
    std::memcpy(to + i * kLanes, &bytes, sizeof(bytes));
  }
}

template <Division division, class T>
void quantize_values(const T* row, int64_t count,
                     const Quantizer<simd::Compute<T>>& quantizer,
                     int8_t* values) {
  constexpr int kLanes = simd::kLanes<simd::Compute<T>>;
  constexpr int64_t kRun = 4 * kLanes;
  const auto quantize_run = [&](const T* from, int8_t* to) {
    const auto quantized = [&](int part) {
      return quantizer.template operator()<division>(
          simd::load(from + part * kLanes));
    };
    store_bytes<IntegerOf<simd::Compute<T>>>(
        to, {quantized(0), quantized(1), quantized(2), quantized(3)});
  };
  int64_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    quantize_run(row + i, values + i);
  }
  if (i < count) {
    T rest[kRun] = {};
    int8_t quantized[kRun];
    const auto left = static_cast<size_t>(count - i);
    std::memcpy(static_cast<void*>(rest), row + i, left * sizeof(T));
    quantize_run(rest, quantized);
    std::memcpy(values + i, quantized, left);
  }
}

void pack_pairs(const int8_t* values, int64_t pairs, int8_t* packed) {
  for (int64_t i = 0; i < pairs; ++i) {
    packed[i] = static_cast<int8_t>(
        (values[2 * i] & 0x0F) | static_cast<uint8_t>(values[2 * i + 1]) << 4);
  }
}

template <Division division, class T>
void quantize_divided(const T* row, const QuantizeRowwisePlan& plan,
                      const Quantizer<simd::Compute<T>>& quantizer,
                      int8_t* output) {
  if (plan.bits == 8) {
    return quantize_values<division>(row, plan.inner, quantizer, output);
  }
  constexpr int64_t kRun = 2048;
  int8_t values[kRun];
  for (int64_t i = 0; i < plan.inner; i += kRun) {
    const int64_t count = std::min(kRun, plan.inner - i);
    quantize_values<division>(row + i, count, quantizer, values);
    pack_pairs(values, count / 2, output + i / 2);
  }
}

template <class T>
T quantize_row(const T* row, const QuantizeRowwisePlan& plan, int8_t* output) {
  using Number = simd::Compute<T>;
  const auto [positive, negative] = largest_magnitudes(row, plan.inner);
  const T rounded = convert<T>(rowwise_scale(positive, negative, plan.bits));
  // Values are divided by the scale that they will be multiplied with.
  const Number scale = convert<Number>(rounded);
  const Quantizer<Number> quantizer{
      scale, static_cast<Number>(least_quantized(plan.bits)),
      static_cast<Number>(most_quantized(plan.bits))};
  if (scale == 0 || !std::isfinite(scale)) {
    std::memset(output, 0, static_cast<size_t>(plan.row_bytes()));
  } else if (division_by(scale) == Division::ByReciprocal) {
    quantize_divided<Division::ByReciprocal>(row, plan, quantizer, output);
  } else {
    quantize_divided<Division::ByProcessor>(row, plan, quantizer, output);
  }
  return rounded;
}

template <class T>
void quantize_rows(const QuantizeRowwisePlan& plan, const TensorView& input,
                   int8_t* values, T* scales) {
  parallel_for(plan.rows, grain_of(kElementGrain, plan.inner),
               [&](int64_t begin, int64_t end) {
                 const ContiguousRows<T, Slot::FirstRow> rows(input);
                 for (int64_t row = begin; row < end; ++row) {
                   scales[row] = quantize_row(rows[row], plan,
                                              values + row * plan.row_bytes());
                 }
               });
}

std::tuple<Tensor, Tensor> quantize_rowwise(const TensorView& input,
                                            int64_t bits) {
  const QuantizeRowwisePlan plan = plan_quantize_rowwise(input, bits);
  auto [values, scales] = allocate_quantized(plan, input);
  auto* to = static_cast<int8_t*>(values.mutable_data_ptr());
  void* scales_to = scales.mutable_data_ptr();
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    quantize_rows<T>(plan, input, to, static_cast<T*>(scales_to));
  });
  return {values, scales};
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&quantize_rowwise>("quantize_rowwise");
}

}  // namespace
}  // namespace pkg::cpu
