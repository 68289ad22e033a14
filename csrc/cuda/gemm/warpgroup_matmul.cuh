// matmul and linear by the products of warpgroups (cuda/gemm/
// warpgroup_product.cuh), for operands that the copy engine takes: each dense
// along one of its dimensions, aligned to 16 bytes, and with one step from each
// matrix of the batch to the next, or the same matrix for all.
//
// As many blocks as there are multiprocessors walk the tiles, in the order of
// tile_order.cuh: a stage takes 1024 cycles, and with tiles of one row would
// need 7.7 TB/s of an H200, whose memory has 4.8; so it needs 1.0.
//
// A product of few tiles is divided along the summed dimension as that of
// cuda/gemm/matmul.cuh is, whose second kernel adds the parts up.
//
// What is not hidden is a tile's end: the consumers store 64 KiB of halves
// while no product runs. At 64 bytes a cycle that is a stage's time, of 64
// stages where the summed dimension has 4096 elements.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "cuda/gemm/warpgroup_product.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// An operand that the copy engine takes, and how it lies.
template <class Element>
struct BulkOperand {
  MappedTensor<Element> tensor;
  Major major;
};

template <class Input>
struct BulkOperands {
  BulkOperand<Input> a;
  BulkOperand<Input> b;
};

// Coordinates are counted in 32 bits, and so are tiles with a grid more.
constexpr int64_t kMostCounted = int64_t{1} << 30;

// Elements from each matrix of the batch to the next; nothing where that is not
// always the same. 0: one matrix for all.
inline std::optional<int64_t> step_of_batch(const BatchSizes& batch,
                                            const BatchStrides& strides) {
  int64_t step = 0;
  int64_t count = 1;
  for (int dimension = batch.count - 1; dimension >= 0; --dimension) {
    if (batch.sizes[dimension] == 1) {
      continue;
    }
    if (count == 1) {
      step = strides.strides[dimension];
    } else if (strides.strides[dimension] != count * step) {
      return std::nullopt;
    }
    count *= batch.sizes[dimension];
  }
  return step;
}

// Of a box, whatever the product.
constexpr int kBulkBoxLines = WarpgroupProduct<bfloat16, 128>::kBoxLines;

inline bool fits_bulk_copies(int64_t outer, int64_t depth,
                             int64_t batch_count) {
  return outer <= kMostCounted && depth <= kMostCounted &&
         batch_count <= kMostCounted;
}

// The operand as the copy engine sees it, or nothing where it cannot.
template <class Element>
std::optional<BulkOperand<Element>> bulk_operand(
    const PanelSource<Element>& operand, int64_t batch_count,
    std::optional<int64_t> batch_step) {
  constexpr int kLines = kBulkBoxLines;
  const int64_t outer = operand.outer_size;
  const int64_t depth = operand.depth_size;
  if (!batch_step || !fits_bulk_copies(outer, depth, batch_count)) {
    return std::nullopt;
  }
  const int64_t matrices = *batch_step == 0 ? 1 : batch_count;
  const MappedTensor<Element> by_outer = {
      operand.data,         depth,       outer, matrices,
      operand.outer_stride, *batch_step, kLines};
  if ((operand.depth_stride == 1 || depth == 1) && by_outer.has_map()) {
    return BulkOperand<Element>{by_outer, Major::depth};
  }
  const MappedTensor<Element> by_steps = {
      operand.data,         outer,       depth, matrices,
      operand.depth_stride, *batch_step, kLines};
  // Products of bytes and of TF32 take no other operands.
  if (sizeof(Element) == 2 && (operand.outer_stride == 1 || outer == 1) &&
      by_steps.has_map()) {
    return BulkOperand<Element>{by_steps, Major::outer};
  }
  return std::nullopt;
}

// Both operands of a product as make(operand, matrices of the batch, step from
// one to the next) has them. Nothing where it has nothing for one, where there
// are no tiles or more than are counted.
template <class Input, class Output, class Make>
auto both_operands(const MatmulProblem<Input, Output>& problem, Make&& make) {
  const PanelSource<Input> a_panels = {problem.a, problem.rows, problem.depth,
                                       problem.a_row_stride,
                                       problem.a_depth_stride};
  const PanelSource<Input> b_panels = {problem.b, problem.columns,
                                       problem.depth, problem.b_column_stride,
                                       problem.b_depth_stride};
  const auto a = make(a_panels, problem.batch_count,
                      step_of_batch(problem.batch, problem.a_batch_strides));
  const auto b = make(b_panels, problem.batch_count,
                      step_of_batch(problem.batch, problem.b_batch_strides));
  const int64_t tiles = problem.batch_count * tiles_of(problem.rows, 128) *
                        tiles_of(problem.columns, 128);
  using Operand = typename std::remove_const_t<decltype(a)>::value_type;
  std::optional<std::pair<Operand, Operand>> both;
  if (a && b && tiles > 0 && tiles <= kMostCounted) {
    both.emplace(*a, *b);
  }
  return both;
}

template <class Input, class Output>
std::optional<BulkOperands<Input>> bulk_operands(
    const MatmulProblem<Input, Output>& problem) {
  const auto both = both_operands(problem, bulk_operand<Input>);
  if (!both) {
    return std::nullopt;
  }
  return BulkOperands<Input>{both->first, both->second};
}

// How a product is shared out: the width of the tiles, and the panels of each
// part of the summed dimension; and the cycles of all multiprocessors that it
// takes.
struct WarpgroupPlan {
  int tile_columns;
  int64_t panels_each;
  int64_t cycles;
};

// Tiles that there are, of 128 rows, and the cycles that a panel of one takes.
struct TileWidth {
  int columns;
  int64_t cycles_of_panel;
};

// The plan that takes the fewest cycles, each block one multiprocessor.
inline WarpgroupPlan plan_warpgroups(int64_t batch_count, int64_t rows,
                                     int64_t columns, int64_t panels,
                                     int64_t blocks,
                                     std::initializer_list<TileWidth> widths = {
                                         {256, 1024}, {128, 640}}) {
  WarpgroupPlan best = {};
  for (const TileWidth& width : widths) {
    const int64_t tiles =
        batch_count * tiles_of(rows, 128) * tiles_of(columns, width.columns);
    for (const int64_t each :
         {panels, panels_of_split(tiles, panels, blocks)}) {
      const int64_t parts = ceil_div(panels, each);
      const int64_t rounds = ceil_div(tiles * parts, blocks);
      const int64_t cycles =
          rounds * each * width.cycles_of_panel +
          cycles_of_parts(parts, batch_count * rows * columns);
      if (best.cycles == 0 || cycles < best.cycles) {
        best = {width.columns, each, cycles};
      }
    }
  }
  return best;
}

struct WarpgroupPlace {
  int piece;   // of c: a matrix of the batch, or a part of its sums
  int matrix;  // of the batch
  int row_begin;
  int column_begin;
  int depth_begin;
  int panels;
};

template <class Input, class Output>
struct WarpgroupProblem {
  TensorMap a;
  TensorMap b;
  Output* c;  // contiguous: batch, splits, rows, columns
  int64_t rows;
  int64_t columns;
  bool a_lines_are_steps;
  bool b_lines_are_steps;
  bool a_has_batch;
  bool b_has_batch;
  // In panels of 128 bytes.
  int panels;
  int panels_each;  // of a part
  int splits;
  int row_tiles;
  int column_tiles;
  int tiles;

  template <class Product>
  __device__ __forceinline__ WarpgroupPlace place(int index) const {
    const int tiles_of_piece = row_tiles * column_tiles;
    const int piece = index / tiles_of_piece;
    const auto [row_tile, column_tile] =
        tile_position(index % tiles_of_piece, row_tiles, column_tiles);
    const int split = piece % splits;
    const int panels_left = panels - split * panels_each;
    return {piece,
            piece / splits,
            row_tile * Product::kRows,
            column_tile * Product::kColumns,
            split * panels_each * Product::kDepth,
            panels_left < panels_each ? panels_left : panels_each};
  }
};

// The problem in tiles of `Product`, from maps of its operands, or of what is
// to be multiplied in their place. `c` holds the parts where the plan divides
// it.
template <class Product, class Number, class Output, class Input, class Result>
WarpgroupProblem<Input, Result> warpgroup_problem(
    const MatmulProblem<Number, Output>& problem,
    const BulkOperands<Input>& operands, const TensorMap& a_map,
    const TensorMap& b_map, int64_t panels_each, Result* c) {
  const auto panels =
      static_cast<int>(tiles_of(problem.depth, Product::kDepth));
  const auto each = static_cast<int>(panels_each);
  WarpgroupProblem<Input, Result> result = {};
  result.a = a_map;
  result.b = b_map;
  result.c = c;
  result.rows = problem.rows;
  result.columns = problem.columns;
  result.a_lines_are_steps = operands.a.major == Major::outer;
  result.b_lines_are_steps = operands.b.major == Major::outer;
  result.a_has_batch = operands.a.tensor.matrices > 1;
  result.b_has_batch = operands.b.tensor.matrices > 1;
  result.panels = panels;
  result.panels_each = each;
  result.splits = ceil_div(panels, each);
  result.row_tiles = static_cast<int>(tiles_of(problem.rows, Product::kRows));
  result.column_tiles =
      static_cast<int>(tiles_of(problem.columns, Product::kColumns));
  result.tiles = static_cast<int>(problem.batch_count) * result.splits *
                 result.row_tiles * result.column_tiles;
  return result;
}

// The producer's thread: copies for all tiles of the block.
template <class Product, class Problem>
__device__ __forceinline__ void copy_tiles(const Product& product,
                                           const Problem& problem) {
  typename Product::Turn turn;
  PKG_UNROLL_BY(1)
  for (int index = static_cast<int>(blockIdx.x); index < problem.tiles;
       index += static_cast<int>(gridDim.x)) {
    const WarpgroupPlace place = problem.template place<Product>(index);
    const BoxSource a = {&problem.a, problem.a_lines_are_steps, place.row_begin,
                         problem.a_has_batch ? place.matrix : 0};
    const BoxSource b = {&problem.b, problem.b_lines_are_steps,
                         place.column_begin,
                         problem.b_has_batch ? place.matrix : 0};
    product.copy(a, b, place.depth_begin, place.panels, turn);
  }
}

// sums = A B, however the operands lie.
template <class Input, class Product, class Problem>
__device__ __forceinline__ void multiply_tile(const Product& product,
                                              const Problem& problem,
                                              typename Product::Sums& sums,
                                              int panels,
                                              typename Product::Turn& turn) {
  constexpr Major kDepth = Major::depth;
  constexpr Major kOuter = Major::outer;
  if constexpr (sizeof(Input) != 2) {
    product.template multiply<kDepth, kDepth>(sums, panels, turn);
  } else if (problem.a_lines_are_steps) {
    if (problem.b_lines_are_steps) {
      product.template multiply<kOuter, kOuter>(sums, panels, turn);
    } else {
      product.template multiply<kOuter, kDepth>(sums, panels, turn);
    }
  } else {
    if (problem.b_lines_are_steps) {
      product.template multiply<kDepth, kOuter>(sums, panels, turn);
    } else {
      product.template multiply<kDepth, kDepth>(sums, panels, turn);
    }
  }
}

// The blocks walk the tiles: one thread copies, the consumers multiply. By all
// threads of blocks of Product's.
template <class Input, class Product, class Problem, class Epilogue>
__device__ __forceinline__ void multiply_by_warpgroups(
    const Problem& problem, const Epilogue& epilogue) {
  PKG_MBARRIERS(full, Product::kStages);
  PKG_MBARRIERS(empty, Product::kStages);
  const Product product(full, empty);
  product.begin();
  if (threadIdx.x >= Product::kConsumers) {
    give_registers<Product::kProducerRegisters>();
    if (threadIdx.x == Product::kConsumers) {
      copy_tiles(product, problem);
    }
    return;
  }
  take_registers<Product::kConsumerRegisters>();
  typename Product::Turn turn;
  PKG_UNROLL_BY(1)
  for (int index = static_cast<int>(blockIdx.x); index < problem.tiles;
       index += static_cast<int>(gridDim.x)) {
    const WarpgroupPlace place = problem.template place<Product>(index);
    typename Product::Sums sums(0);
    multiply_tile<Input>(product, problem, sums, place.panels, turn);
    epilogue(sums, problem, place.piece, place.row_begin, place.column_begin);
    store_tile(sums, problem.c + place.piece * problem.rows * problem.columns,
               problem.rows, problem.columns, problem.columns, place.row_begin,
               place.column_begin);
  }
}

template <class Input, class Output, int kTileColumns,
          class Epilogue = KeepSums>
__global__ void __launch_bounds__(
    WarpgroupProduct<Input, kTileColumns>::kThreads, 1)
    matmul_warpgroup_kernel(
        const __grid_constant__ WarpgroupProblem<Input, Output> problem,
        const __grid_constant__ Epilogue epilogue) {
  let_next_kernel_begin();
  if constexpr (kCompilesWarpgroups) {
    multiply_by_warpgroups<Input, WarpgroupProduct<Input, kTileColumns>>(
        problem, epilogue);
  } else {
    commit_products();  // which traps
  }
}

}  // namespace pkg::cuda
