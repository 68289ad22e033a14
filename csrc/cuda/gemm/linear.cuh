// linear: the product of cuda/gemm/matmul.cuh, whose tile gets the bias and the
// activation while it is in registers.
//
// Operations: those of the product, and some 30 for an element of the result.
// Bytes: those of the product and the bias, which comes from the cache; the
// activation's argument is written where the gradient needs it. A pass over
// the result of its own would read and write all of it again.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/activation.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Adds the bias to a tile of sums, and keeps it where the gradient needs it.
template <class Epilogue, class Tile, class Problem>
__device__ __forceinline__ void make_pre_activation(
    const Epilogue& epilogue, Tile& tile, const Problem& problem, int64_t batch,
    int64_t row_begin, int64_t column_begin) {
  using Number = typename Tile::Value;
  if (epilogue.bias != nullptr) {
    tile.add_to_columns([&](int place) {
      const int64_t column = column_begin + place;
      return column < problem.columns
                 ? convert<Number>(epilogue.bias[column * epilogue.bias_stride])
                 : Number(0);
    });
  }
  if (epilogue.pre_activation != nullptr) {
    store_tile(tile,
               epilogue.pre_activation + batch * problem.rows * problem.columns,
               problem.rows, problem.columns, problem.columns, row_begin,
               column_begin);
  }
}

// The same for every activation: for kernels whose threads have a result each,
// of which there need not be one for each activation.
template <class Element>
struct AnyLinearEpilogue {
  const Element* bias;
  int64_t bias_stride;
  Element* pre_activation;
  Activation activation;

  template <class Tile, class Problem>
  __device__ __forceinline__ void operator()(Tile& tile, const Problem& problem,
                                             int64_t batch, int64_t row_begin,
                                             int64_t column_begin) const {
    using Number = Accumulator<Element>;
    make_pre_activation(*this, tile, problem, batch, row_begin, column_begin);
    tile.transform_values([this](Number value) {
      return activated<sizeof(Element) == 2>(activation, value);
    });
  }
};

template <class Element, class Function>
struct LinearEpilogue {
  const Element* bias;  // null without one
  int64_t bias_stride;
  Element* pre_activation;  // as the result; null where it is not kept

  template <class Tile, class Problem>
  __device__ __forceinline__ void operator()(Tile& tile, const Problem& problem,
                                             int64_t batch, int64_t row_begin,
                                             int64_t column_begin) const {
    using Number = Accumulator<Element>;
    make_pre_activation(*this, tile, problem, batch, row_begin, column_begin);
    using Applied = std::conditional_t<sizeof(Element) == 2,
                                       typename Function::Quick, Function>;
    tile.transform_values([](Number value) { return Applied()(value); });
  }

  AnyLinearEpilogue<Element> of_any_kind() const {
    return {bias, bias_stride, pre_activation, Function::kKind};
  }
  // Of the one column of a product that is made as a row: all have its bias.
  LinearEpilogue of_one_column() const { return {bias, 0, pre_activation}; }
};

}  // namespace pkg::cuda
