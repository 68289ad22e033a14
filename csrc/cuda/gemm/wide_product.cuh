// Products of halves and bytes by tensor cores in tiles twice as wide as those
// of cuda/gemm/block_product.cuh, where there are tiles enough.
//
// A block of eight warps computes 128 x 256 sums, a warp 64 x 64 as there: so
// its registers, and the bytes that it loads from shared memory, are the same.
// What it copies from the L2 cache is less: 48 KiB for 64 steps of a tile,
// where two tiles of 128 x 128 take 64. At an A100's rate of 2048 operations a
// cycle these are 24 bytes a cycle for every multiprocessor, and 32. (An H200
// ran tiles of 128 x 128 of bfloat16, n = 8192, at 303 TFLOP/s: 17 GB in 3.6
// ms, 4.7 TB/s from that cache.) Three stages of 48 KiB are one block of a
// multiprocessor.
#pragma once

#include <cstdint>

#include "cuda/gemm/block_product.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Whether there are such products of an element.
template <class Element>
constexpr bool kHasWideProduct = sizeof(Element) <= 2;

template <class Element>
struct WideProduct : MmaProduct<Element, 128, 256, 64, 64, 3> {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 256;
  static constexpr int kBlocks = 1;
};

// Whether wide tiles take less time on so many multiprocessors, by the bytes of
// the L2 cache that the busiest one takes: three to a wide tile for two to one
// of block_product.cuh.
template <class Element>
bool pays_wide_tiles(int64_t batch_count, int64_t rows, int64_t columns,
                     int64_t multiprocessors, int most_shared_bytes) {
  if (WideProduct<Element>::kSharedBytes > most_shared_bytes) {
    return false;
  }
  const auto rounds = [&]<class Product>() {
    const int64_t tiles = batch_count * tiles_of(rows, Product::kRows) *
                          tiles_of(columns, Product::kColumns);
    return ceil_div(tiles, multiprocessors);
  };
  return 3 * rounds.template operator()<WideProduct<Element>>() <
         2 * rounds.template operator()<BlockProduct<Element>>();
}

}  // namespace pkg::cuda
