// dequantize_tensor_core_tiled_layout: (q - 8) scale + zero, rounded once to
// bfloat16, as the fused multiply-add of torchao's kernel (__hfma2) rounds it.
//
// The product is exact in float32 (4 and 8 significant bits), the sum is not,
// and rounding it to float32 first would decide wrongly where that makes it lie
// between two numbers of bfloat16. So it is rounded to odd on the way: of the
// two numbers of float32 around it the one whose last bit is set, which is
// never between two of bfloat16 (Boldo and Melquiond, "Emulation of FMA and
// correctly rounded sums: proved algorithms using rounding to odd", IEEE
// Transactions on Computers 57, 2008). The rounding error, by Knuth's sum of
// two, says which one.
//
// A group of a row has sixteen such numbers at most. They are computed once and
// looked up: the words of a block's four lanes, repeated over a register and
// shifted each to its place, hold the two values of neighbouring columns 16
// bits apart, in the order in which the result is stored. Bound by writing it.
#include "cpu/int4/tiled_weight.h"
#include "cpu/runtime/parallel.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

using simd::Vector;

// whole * scale + zero, for |whole| <= 8, rounded to odd: rounding it to
// bfloat16 is the only one that counts.
Vector<float> multiply_add(Vector<float> whole, uint32_t pair) {
  // The sum would overflow float32 where that of bfloat16 need not, so it is
  // made of sixteenths. Multiples of the least number of bfloat16 are exact in
  // float32 all the same.
  constexpr float kDown = 0x1p-4F;
  const auto product = whole * (scale_of_pair(pair) * kDown);
  const auto addend = simd::broadcast(zero_of_pair(pair) * kDown);
  const Vector<float> sum = product + addend;
  const Vector<float> part = sum - product;
  // NaN where the sum is not finite, which is kept then.
  const Vector<float> rest = (product - (sum - part)) + (addend - part);
  const auto bits = std::bit_cast<Vector<uint32_t>>(sum);
  const auto away = std::bit_cast<Vector<uint32_t>>((rest > 0) == (sum > 0));
  const auto towards_rest = bits + (away & 2U) - 1U;
  const auto is_rounded =
      std::bit_cast<Vector<uint32_t>>((rest > 0) | (rest < 0));
  const Vector<uint32_t> to_odd =
      (is_rounded & ((bits & 1U) - 1U)) != 0 ? towards_rest : bits;
  return std::bit_cast<Vector<float>>(to_odd) / kDown;
}

// The weights that a group's sixteen values stand for.
class Weights {
 public:
  explicit Weights(uint32_t pair) {
    constexpr int kLanes = simd::kLanes<float>;
    for (int first = 0; first < 16; first += kLanes) {
      Vector<float> whole;
      for (int lane = 0; lane < kLanes; ++lane) {
        whole[lane] = static_cast<float>(first + lane - 8);
      }
      simd::store(weights_ + first, multiply_add(whole, pair));
    }
    prepare();
  }

  // Of the values in bits 0 to 3 and 16 to 19 of each lane.
  Vector<uint32_t> of(Vector<uint32_t> values) const;

 private:
  void prepare();

  alignas(32) simd::BFloat16 weights_[16];
#if defined(__AVX512BW__)
  __m512i table_;
#elif defined(__SSSE3__) || defined(__aarch64__)
  Vector<uint8_t> low_;
  Vector<uint8_t> high_;
#endif
};

#if defined(__AVX512BW__)

void Weights::prepare() {
  // Twice, since a place has five bits. With every lane asked for: GCC 12 takes
  // the plain broadcast for one that reads what was never written.
  table_ = _mm512_maskz_broadcast_i64x4(
      0xFF, _mm256_load_si256(reinterpret_cast<const __m256i*>(weights_)));
}

Vector<uint32_t> Weights::of(Vector<uint32_t> values) const {
  return std::bit_cast<Vector<uint32_t>>(
      _mm512_permutexvar_epi16(std::bit_cast<__m512i>(values), table_));
}

#elif defined(__SSSE3__) || defined(__aarch64__)

void Weights::prepare() {
  using Bits = simd::VectorOf<uint16_t, 32>::type;
  using Bytes = simd::VectorOf<uint8_t, 16>::type;
  Bits bits;
  std::memcpy(&bits, weights_, sizeof(bits));
  const auto low = __builtin_convertvector(bits & uint16_t{0xFF}, Bytes);
  const auto high = __builtin_convertvector(bits >> 8, Bytes);
  for (int i = 0; i < simd::kVectorBytes; i += 16) {
    std::memcpy(reinterpret_cast<std::byte*>(&low_) + i, &low, sizeof(low));
    std::memcpy(reinterpret_cast<std::byte*>(&high_) + i, &high, sizeof(high));
  }
}

// Sixteen bytes for each place; a place with the highest bit set gives zero.
Vector<uint32_t> look_up(Vector<uint8_t> table, Vector<uint32_t> places) {
#if defined(__AVX2__)
  return std::bit_cast<Vector<uint32_t>>(_mm256_shuffle_epi8(
      std::bit_cast<__m256i>(table), std::bit_cast<__m256i>(places)));
#elif defined(__aarch64__)
  return std::bit_cast<Vector<uint32_t>>(vqtbl1q_u8(
      std::bit_cast<uint8x16_t>(table), std::bit_cast<uint8x16_t>(places)));
#else
  return std::bit_cast<Vector<uint32_t>>(_mm_shuffle_epi8(
      std::bit_cast<__m128i>(table), std::bit_cast<__m128i>(places)));
#endif
}

Vector<uint32_t> Weights::of(Vector<uint32_t> values) const {
  const Vector<uint32_t> places = values & 0x000F000FU;
  return look_up(low_, places | 0x80008000U) |
         look_up(high_, places << 8 | 0x00800080U);
}

#else

void Weights::prepare() {}

Vector<uint32_t> Weights::of(Vector<uint32_t> values) const {
  Vector<uint32_t> result;
  for (int lane = 0; lane < simd::kLanes<uint32_t>; ++lane) {
    const uint32_t both = values[lane];
    result[lane] = weights_[both & 15U].x |
                   static_cast<uint32_t>(weights_[both >> 16 & 15U].x) << 16;
  }
  return result;
}

#endif

void dequantize_row(const TiledWeight& weight, int64_t row, uint32_t* to) {
  constexpr int kLanes = simd::kLanes<uint32_t>;
  constexpr int kParts = 16 / kLanes;
  const TiledLayout& layout = weight.layout;
  const int64_t blocks = weight.group_size / kTiledBlock;
  Vector<uint32_t> shifts[kParts];
  for (int lane = 0; lane < 16; ++lane) {
    shifts[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(lane / 4 * 4);
  }
  for (int64_t group = 0; group < weight.groups(); ++group) {
    const Weights weights(weight.pair(group, row));
    for (int64_t block = group * blocks; block < (group + 1) * blocks;
         ++block) {
      uint32_t lanes[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = weight.words[layout.word(row, block, lane % 4)];
      }
      const Vector<uint32_t> words = simd::load(lanes);
      for (int part = 0; part < kParts; ++part) {
        simd::store(to + block * 16 + part * kLanes,
                    weights.of(words >> shifts[part]));
      }
    }
  }
}

Tensor dequantize_tensor_core_tiled_layout(const TensorView& packed_w,
                                           const TensorView& scales_and_zeros,
                                           int64_t group_size,
                                           int64_t inner_k_tiles) {
  const TiledLayout layout = plan_dequantize_tensor_core_tiled_layout(
      packed_w, scales_and_zeros, group_size, inner_k_tiles);
  const std::array sizes{layout.rows, layout.columns};
  const Tensor result =
      empty_contiguous(sizes, ScalarType::BFloat16, device_of(packed_w));
  const TiledWeight weight =
      tiled_weight(layout, group_size, packed_w, scales_and_zeros);
  // Two values at a time: columns are a multiple of 32.
  auto* to = static_cast<uint32_t*>(result.mutable_data_ptr());
  parallel_for(layout.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      dequantize_row(weight, row, to + row * layout.columns / 2);
    }
  });
  return result;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&dequantize_tensor_core_tiled_layout>(
      "dequantize_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cpu
