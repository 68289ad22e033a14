// The product of a block: the tile of sums, its size, and how it is computed,
// for each type of element.
//
// float16, bfloat16 and int8: tensor cores (cuda/gemm/mma_product.cuh). A block
// of four warps computes 128 x 128 sums, a warp 64 x 64, which are 128
// registers of each thread. For 32 bytes of the summed dimension a warp loads
// eight times four matrices (ldmatrix) for 32 products (mma): 4 KiB of shared
// memory, 32 cycles of a multiprocessor of which the products take 64 at the
// rate of an A100. Two stages of 128 bytes of the summed dimension are 64 KiB,
// so that two blocks fit into a multiprocessor by memory and by registers.
// Where there are tiles enough matmul and linear use those of
// cuda/gemm/wide_product.cuh, which take less of the L2 cache. On compute
// capability 9.0 this is half of the rate: there they use
// cuda/gemm/warpgroup_matmul.cuh where their operands allow it.
//
// float64: the tensor cores too, by panels of eight steps, 64 x 64 sums of
// eight warps.
//
// float32: multiply-adds, by the classic blocked product (Volkov and Demmel,
// "Benchmarking GPUs to tune dense linear algebra", SC 2008). A thread's 8 x 8
// sums need 16 numbers of shared memory for 64 multiplications.
//
// matmul and linear of float32 and float64 use cuda/gemm/large_product.cuh
// where there are enough tiles of its size, and its small ones where there are
// few of these.
//
// float32 in TF32 (`Tf32`), where the user allows it: as the halves, with the
// same bytes for as many products, each of half of the steps, so that the
// products take 64 cycles of the A100 too. Operands are rounded in registers,
// by two instructions a word. They lie in shared memory as they lie in global
// memory, by rows, by columns or by steps; what lies by steps is loaded by
// words of 32 bits, four loads for one of ldmatrix and the same 4 KiB in all.
//
// 2 m n k operations. Global memory is read (m n k)(1/kRows + 1/kColumns)
// elements, for the most part from the L2 cache.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// By panels of the accumulator's type.
template <class Element, int kTileSize, int kSteps, class Thread>
struct PanelProduct {
  static constexpr int kRows = kTileSize;
  static constexpr int kColumns = kTileSize;
  static constexpr int kDepth = kSteps;
  static constexpr int kThreads = kTileThreads;
  static constexpr int kSharedBytes = 0;  // beyond what is declared
  static constexpr int kBlocks = 2;       // in a multiprocessor
  using Number = Accumulator<Element>;
  using Sums = Tile<Number, kRows, kColumns, Thread>;

  // sums += A B over the whole summed dimension. On return every thread is done
  // with the shared memory.
  __device__ __forceinline__ static void multiply(Sums& sums,
                                                  const PanelSource<Element>& a,
                                                  int64_t row_begin,
                                                  const PanelSource<Element>& b,
                                                  int64_t column_begin) {
    PKG_SHARED(Number, a_panels, [2][kSteps][kRows + kPanelPadding]);
    PKG_SHARED(Number, b_panels, [2][kSteps][kColumns + kPanelPadding]);
    cuda::multiply<kSteps>(sums, a, row_begin, b, column_begin, a_panels,
                           b_panels);
  }
};

template <class Element>
struct BlockProduct : MmaProduct<Element, 128, 128, 64, 64, 2> {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 128;
  static constexpr int kBlocks = 2;
};
template <>
struct BlockProduct<float> : PanelProduct<float, 128, 8, TileThread> {};
template <>
struct BlockProduct<double>
    : PanelProduct<double, 64, 8, MmaThread<64, 64, 32, 16>> {};

}  // namespace pkg::cuda
