// int4_linear in float32 and float64: whether to write the weight out and
// multiply by that takes less time than to read it packed,
// int4_linear_wide.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/int4/int4_linear_wide.cuh"

namespace pkg::cuda {

// Cycles of the kernel that reads the weight packed, once for eight rows. An
// H100 took 251 us for 16 rows, 4096 to 4096, whose blocks all run at a time:
// 107 cycles a step of the summed dimension (1.755 GHz). And 538 us for 128:
// of a multiprocessor, 46 cycles for 100 weights and eight rows. In float64 the
// loop has as many instructions; it was not measured.
inline int64_t cycles_of_packed_weight(int64_t batch_count, int64_t rows,
                                       int64_t columns, int64_t depth,
                                       int64_t multiprocessors) {
  const int64_t strips = batch_count * tiles_of(rows, Int4Wide::kRows);
  return std::max(depth * 107,
                  strips * columns * depth / multiprocessors * 46 / 100);
}

// Cycles of the other way: two launches; the weight, written and read; and
// multiply-adds of whole tiles, at half of the rate of 128 a cycle. An H100
// makes 69 of those in float32 (469 us for 128 rows, 4096 to 14336), and more
// of many rows.
template <class Element>
int64_t cycles_of_written_weight(int64_t batch_count, int64_t rows,
                                 int64_t columns, int64_t depth,
                                 int64_t multiprocessors) {
  constexpr int64_t kLaunches = 15000;
  constexpr int64_t kACycle = 64;
  constexpr int64_t kTileRows = BlockProduct<Element>::kRows;
  const int64_t bytes = 2 * int64_t{sizeof(Element)} * columns * depth;
  const int64_t whole_rows =
      batch_count * tiles_of(rows, kTileRows) * kTileRows;
  return kLaunches + bytes / kMemoryBytesOfCycle +
         whole_rows * columns / multiprocessors * depth / kACycle;
}

// Up to eight rows read the packed weight once, and no more. (4096 to 4096 an
// H100 took 85, 128 and 231 us for 2, 4 and 8 rows so, and 148 for 9 and 157
// for 128 with the weight written out.)
template <class Element>
bool pays_to_write_out(int64_t batch_count, int64_t rows, int64_t columns,
                       int64_t depth, int64_t multiprocessors) {
  return rows > Int4Wide::kRows &&
         cycles_of_written_weight<Element>(batch_count, rows, columns, depth,
                                           multiprocessors) <
             cycles_of_packed_weight(batch_count, rows, columns, depth,
                                     multiprocessors);
}

}  // namespace pkg::cuda
