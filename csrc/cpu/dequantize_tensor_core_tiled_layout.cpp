// dequantize_tensor_core_tiled_layout: (q - 8) scale + zero in float32, rounded
// once more to bfloat16. The product is exact (4 and 8 significant bits), so
// that it makes no difference whether the addition is fused with it.
//
// The words of a block's four lanes, repeated over a register and shifted each
// to its place, hold the two values of neighbouring columns 16 bits apart: the
// result in the order in which it is stored. Bound by writing it.
#include "../namespace.h"
#include "parallel.h"
#include "tiled_weight.h"

namespace pkg::cpu {
namespace {

using simd::Vector;

// bfloat16 in the upper half of each lane, to nearest even.
Vector<uint32_t> round_to_bfloat16(Vector<float> value) {
  const auto bits = std::bit_cast<Vector<uint32_t>>(value);
  const Vector<uint32_t> rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  return (value == value ? rounded : bits | 0x00400000U) & 0xFFFF0000U;
}

void dequantize_row(const TiledWeight& weight, int64_t row, uint32_t* to) {
  constexpr int kLanes = simd::kLanes<uint32_t>;
  constexpr int kParts = 16 / kLanes;
  const TiledLayout& layout = weight.layout;
  Vector<uint32_t> shifts[kParts];
  for (int lane = 0; lane < 16; ++lane) {
    shifts[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(lane / 4 * 4);
  }
  for (int64_t block = 0; block < layout.blocks(); ++block) {
    const uint32_t pair =
        weight.pair(block * kTiledBlock / weight.group_size, row);
    const Vector<float> scale = simd::broadcast(scale_of_pair(pair));
    const Vector<float> zero = simd::broadcast(zero_of_pair(pair));
    uint32_t lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = weight.words[layout.word(row, block, lane % 4)];
    }
    const Vector<uint32_t> words = simd::load(lanes);
    const auto value_of = [&](Vector<uint32_t> q) {
      const auto whole = std::bit_cast<Vector<int32_t>>(q & 15U) - 8;
      return round_to_bfloat16(
          __builtin_convertvector(whole, Vector<float>) * scale + zero);
    };
    for (int part = 0; part < kParts; ++part) {
      const Vector<uint32_t> shifted = words >> shifts[part];
      simd::store(to + block * 16 + part * kLanes,
                  (value_of(shifted) >> 16) | value_of(shifted >> 16));
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
