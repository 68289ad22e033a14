// unpack_tensor_core_tiled_layout: bound by writing the 32-bit values.
#include "cpu/int4/tiled_weight.h"
#include "cpu/runtime/parallel.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

Tensor unpack_tensor_core_tiled_layout(const TensorView& packed_w,
                                       int64_t inner_k_tiles) {
  const TiledLayout layout =
      plan_unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles);
  const std::array sizes{layout.rows, layout.columns};
  const Tensor values =
      empty_contiguous(sizes, ScalarType::Int, device_of(packed_w));
  const uint32_t* words =
      contiguous_elements<uint32_t, Slot::WeightWords>(packed_w);
  auto* to = static_cast<uint32_t*>(values.mutable_data_ptr());
  parallel_for(layout.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t block = 0; block < layout.blocks(); ++block) {
        uint32_t* out = to + row * layout.columns + block * kTiledBlock;
        for (int64_t lane = 0; lane < 4; ++lane) {
          const uint32_t word = words[layout.word(row, block, lane)];
          for (int64_t j = 0; j < 4; ++j) {
            out[8 * j + 2 * lane] = word >> (4 * j) & 15U;
            out[8 * j + 2 * lane + 1] = word >> (4 * j + 16) & 15U;
          }
        }
      }
    }
  });
  return values;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&unpack_tensor_core_tiled_layout>(
      "unpack_tensor_core_tiled_layout");
}

}  // namespace
}  // namespace pkg::cpu
