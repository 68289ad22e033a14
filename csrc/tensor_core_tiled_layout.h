// The tensor-core tiled layout of 4-bit weights: where a value lies in it, and
// the checks of the operators that write and read it.
//
// It is the order in which mma.m16n8k16 takes its operand B, and that of
// PyTorch's _convert_weight_to_int4pack on CUDA: int32 words of eight values,
// [rows / 8][columns / (16 inner_k_tiles)][32 lanes][inner_k_tiles / 2].
#pragma once

#include <array>
#include <cstdint>

#include "host/integer_math.h"
#include "host/pointwise.h"
#include "host/tensor.h"

namespace pkg {

// A block is the 32 columns that four lanes hold in one word each: lane `c` of
// the four has columns 8 j + 2 c + h of the block, j in 0..3 and h in 0..1, in
// the four bits from 4 j + 16 h on.
inline constexpr int64_t kTiledBlock = 32;
inline constexpr int64_t kTiledRows = 8;

struct TiledLayout {
  int64_t rows;
  int64_t columns;
  int64_t inner_k_tiles;

  int64_t blocks() const { return columns / kTiledBlock; }
  int64_t words() const { return rows * columns / 8; }
  // Of eight rows.
  int64_t words_of_tile() const { return columns; }
  // Of one lane of a supertile: a word for each of its blocks.
  int64_t words_of_lane() const { return inner_k_tiles / 2; }
  // Of one row of a supertile: contiguous, lane by lane.
  int64_t words_of_row() const { return 2 * inner_k_tiles; }

  int64_t word(int64_t row, int64_t block, int64_t lane) const {
    const int64_t supertile = block / words_of_lane();
    return row / kTiledRows * words_of_tile() +
           supertile * kTiledRows * words_of_row() +
           row % kTiledRows * words_of_row() + lane * words_of_lane() +
           block % words_of_lane();
  }

  std::array<int64_t, 4> sizes() const {
    return {rows / kTiledRows, columns / (16 * inner_k_tiles), 32,
            words_of_lane()};
  }
};

inline void check_inner_k_tiles(const char* op, int64_t inner_k_tiles) {
  PKG_CHECK(inner_k_tiles == 2 || inner_k_tiles == 4 || inner_k_tiles == 8, op,
            ": inner_k_tiles is ", inner_k_tiles, "; it must be 2, 4 or 8");
}

inline void check_int32(const char* op, const char* name,
                        const TensorView& tensor) {
  check_strided(op, name, tensor);
  PKG_CHECK(dtype_of(tensor) == ScalarType::Int, op, ": ", name, " is ",
            dtype_name(dtype_of(tensor)), "; it must be torch.int32");
}

// The layout that `w` is packed into, its rows filled up to whole tiles: int32
// (rows, columns), or uint8 (rows, columns / 2) with the even column in the
// high four bits, as _convert_weight_to_int4pack takes it.
inline TiledLayout plan_pack_tensor_core_tiled_layout(const TensorView& w,
                                                      int64_t inner_k_tiles) {
  constexpr const char* kOp = "pack_tensor_core_tiled_layout";
  check_strided(kOp, "w", w);
  const ScalarType type = dtype_of(w);
  PKG_CHECK(type == ScalarType::Int || type == ScalarType::Byte, kOp, ": w is ",
            dtype_name(type),
            "; it must be torch.int32, of one value in each element, or "
            "torch.uint8, of two, the even column in the high four bits");
  check_inner_k_tiles(kOp, inner_k_tiles);
  const auto sizes = sizes_of(w);
  const bool is_pairs = type == ScalarType::Byte;
  PKG_CHECK(sizes.size() == 2, kOp, ": w has shape ", shape_text(w),
            " but must have two dimensions, ",
            is_pairs ? "(rows, columns / 2)" : "(rows, columns)");
  const int64_t columns = is_pairs ? 2 * sizes[1] : sizes[1];
  PKG_CHECK(columns % (16 * inner_k_tiles) == 0, kOp, ": w of shape ",
            shape_text(w), " has ", columns, " columns",
            is_pairs ? ", two in each byte" : "", "; with inner_k_tiles ",
            inner_k_tiles, " they must be a multiple of ", 16 * inner_k_tiles);
  const int64_t tiles = ceil_div(sizes[0], kTiledRows);
  return {tiles * kTiledRows, columns, inner_k_tiles};
}

// The layout that packed_w is in.
inline TiledLayout plan_tensor_core_tiled_layout(const char* op,
                                                 const TensorView& packed_w,
                                                 int64_t inner_k_tiles) {
  check_int32(op, "packed_w", packed_w);
  check_inner_k_tiles(op, inner_k_tiles);
  const auto sizes = sizes_of(packed_w);
  PKG_CHECK(
      sizes.size() == 4 && sizes[2] == 32 && sizes[3] == inner_k_tiles / 2, op,
      ": packed_w has shape ", shape_text(packed_w), "; with inner_k_tiles ",
      inner_k_tiles, " it must have shape (rows / 8, columns / ",
      16 * inner_k_tiles, ", 32, ", inner_k_tiles / 2,
      "), as pack_tensor_core_tiled_layout returns it");
  return {sizes[0] * kTiledRows, sizes[1] * 16 * inner_k_tiles, inner_k_tiles};
}

inline TiledLayout plan_unpack_tensor_core_tiled_layout(
    const TensorView& packed_w, int64_t inner_k_tiles) {
  return plan_tensor_core_tiled_layout("unpack_tensor_core_tiled_layout",
                                       packed_w, inner_k_tiles);
}

// A scale and a zero for each row and group of columns.
inline void check_scales_and_zeros(const char* op, const TiledLayout& layout,
                                   const TensorView& packed_w,
                                   const TensorView& scales_and_zeros,
                                   int64_t group_size) {
  check_strided(op, "scales_and_zeros", scales_and_zeros);
  PKG_CHECK(dtype_of(scales_and_zeros) == ScalarType::BFloat16, op,
            ": scales_and_zeros is ", dtype_name(dtype_of(scales_and_zeros)),
            "; it must be torch.bfloat16");
  check_same_device(op, "packed_w", packed_w, "scales_and_zeros",
                    scales_and_zeros);
  PKG_CHECK(group_size == 32 || group_size == 64 || group_size == 128 ||
                group_size == 256,
            op, ": group_size is ", group_size,
            "; it must be 32, 64, 128 or 256");
  PKG_CHECK(layout.columns % group_size == 0, op, ": packed_w of shape ",
            shape_text(packed_w), " has ", layout.columns,
            " columns, not a multiple of group_size ", group_size);
  const std::array expected{layout.columns / group_size, layout.rows,
                            int64_t{2}};
  PKG_CHECK(std::ranges::equal(sizes_of(scales_and_zeros), expected), op,
            ": scales_and_zeros has shape ", shape_text(scales_and_zeros),
            "; for ", layout.rows, " rows of ", layout.columns,
            " columns in groups of ", group_size, " it must have shape ",
            shape_text(expected), ", (columns / group_size, rows, 2)");
}

inline TiledLayout plan_dequantize_tensor_core_tiled_layout(
    const TensorView& packed_w, const TensorView& scales_and_zeros,
    int64_t group_size, int64_t inner_k_tiles) {
  constexpr const char* kOp = "dequantize_tensor_core_tiled_layout";
  const TiledLayout layout =
      plan_tensor_core_tiled_layout(kOp, packed_w, inner_k_tiles);
  check_scales_and_zeros(kOp, layout, packed_w, scales_and_zeros, group_size);
  return layout;
}

}  // namespace pkg
