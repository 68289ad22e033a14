// pack_tensor_core_tiled_layout: eight values of a row to a word, bound by
// reading the values.
#include "cpu/runtime/parallel.h"
#include "host/namespace.h"
#include "tensor_core_tiled_layout.h"

namespace pkg::cpu {
namespace {

// The word of a block's lane, and in `seen` the bits of all its values.
uint32_t pack_word(const int32_t* block, int64_t stride, int64_t lane,
                   uint32_t& seen) {
  uint32_t word = 0;
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t h = 0; h < 2; ++h) {
      const auto value =
          static_cast<uint32_t>(block[(8 * j + 2 * lane + h) * stride]);
      seen |= value;
      word |= (value & 15U) << (4 * j + 16 * h);
    }
  }
  return word;
}

// Of bytes with the even column in the high four bits.
uint32_t pack_word(const uint8_t* block, int64_t stride, int64_t lane,
                   uint32_t& /*seen*/) {
  uint32_t word = 0;
  for (int64_t j = 0; j < 4; ++j) {
    const uint32_t both = block[(4 * j + lane) * stride];
    word |= both >> 4 << (4 * j) | (both & 15U) << (4 * j + 16);
  }
  return word;
}

template <class Value>
void pack(const TiledLayout& layout, const TensorView& w, uint32_t* to) {
  constexpr int64_t kBlockElements =
      sizeof(Value) == 1 ? kTiledBlock / 2 : kTiledBlock;
  const auto strides = strides_of(w);
  const int64_t rows = sizes_of(w)[0];
  const auto* from = static_cast<const Value*>(w.const_data_ptr());
  parallel_for(layout.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint32_t seen = 0;
      for (int64_t block = 0; block < layout.blocks(); ++block) {
        for (int64_t lane = 0; lane < 4; ++lane) {
          to[layout.word(row, block, lane)] =
              row < rows ? pack_word(from + row * strides[0] +
                                         block * kBlockElements * strides[1],
                                     strides[1], lane, seen)
                         : 0;
        }
      }
      PKG_CHECK(seen <= 15,
                "pack_tensor_core_tiled_layout: w has a value in row ", row,
                " that is not from 0 to 15, which is all that four bits hold");
    }
  });
}

Tensor pack_tensor_core_tiled_layout(const TensorView& w,
                                     int64_t inner_k_tiles) {
  const TiledLayout layout =
      plan_pack_tensor_core_tiled_layout(w, inner_k_tiles);
  const Tensor packed =
      empty_contiguous(layout.sizes(), ScalarType::Int, device_of(w));
  auto* to = static_cast<uint32_t*>(packed.mutable_data_ptr());
  if (dtype_of(w) == ScalarType::Byte) {
    pack<uint8_t>(layout, w, to);
  } else {
    pack<int32_t>(layout, w, to);
  }
  return packed;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&pack_tensor_core_tiled_layout>("pack_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cpu
