// What a block has of attention by multiply-adds: scores in registers, panels
// in shared memory.
#pragma once

#include <type_traits>

#include "cuda/attention/problem.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The scores that a block has in the kernels that multiply them without tensor
// cores and have registers for 8 x 8 of a thread: what it loads is multiplied
// more often than of 4 x 4, which float64 has, whose numbers take two
// registers. The scores are as wide as the tile of heads, so that a thread has
// 8 x 8 of each.
template <class Number, int kWidth = kAttentionTile>
struct AttentionGrid {
  static constexpr int kColumns = sizeof(Number) == 4 ? kWidth : kAttentionTile;
  using Thread = std::conditional_t<sizeof(Number) == 4,
                                    GridThread<8, kColumns / 8>, TileThread>;
  using Scores = Tile<Number, kAttentionTile, kColumns, Thread>;
};

// Steps of a panel. In float32 two panels of each operand and one tile of
// weights take 43 KiB of shared memory; float64 fits the 48 KiB that a block
// has without asking by taking a quarter of the steps.
template <class Element>
constexpr int kAttentionDepth = std::is_same_v<Element, double> ? 4 : 16;

}  // namespace pkg::cuda
