// rotary_embedding and its gradient: each pair of a row's elements times the
// matrix of a rotation, whose cosines and sines are read from tables (RoFormer,
// https://arxiv.org/abs/2104.09864), in float32 (float64 for float64).
//
// As many lanes as a row has items, up to a warp, take a row. An item is
// kPacket pairs, read and written as two packets of 16 bytes, or a packet of
// what is copied; where rows are not aligned, or their elements not side by
// side, it is one pair or one element. So only the number of a row is divided,
// to find where it lies, once for all items of a lane, and by multiplications
// where there are fewer than 2^31 rows.
//
// Bytes: the input once and the result once; the tables come from the cache, as
// all heads of a position have them in common. Six operations a pair: bound by
// memory. Blocks of 256 threads without shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

constexpr int kRotaryThreads = 256;

// Elements of 16 bytes.
template <class Element>
constexpr int kRotaryPacket = 16 / static_cast<int>(sizeof(Element));

// What the operands have in this order: the output, the input, both tables.
constexpr int kRotaryOperands = 4;

template <class Element, class Table>
struct RotaryOperands {
  Element* output;
  const Element* input;
  const Table* cos;
  const Table* sin;
};

struct RotaryShape {
  BatchSizes rows_of;
  BatchStrides row_strides[kRotaryOperands];
  int64_t steps[kRotaryOperands];  // between neighbours of a row
  int64_t inner;                   // elements of a row
  int64_t half;                    // pairs of a row that are turned
  bool has_neighbours;             // as pairs; else the two halves are
  bool turns_back;

  __host__ __device__ int64_t row_count() const {
    int64_t count = 1;
    for (int dimension = 0; dimension < rows_of.count; ++dimension) {
      count *= rows_of.sizes[dimension];
    }
    return count;
  }
};

// `Divisor` is FastDivisor where there are fewer than 2^31 rows.
template <class Element, class Table, class Divisor>
struct RotaryProblem {
  RotaryOperands<Element, Table> operands;
  RotaryShape shape;
  Divisor sizes[kMaxBatchDims];
  int64_t rows;
  int64_t turned_items;  // of a row; those that are copied follow
  int64_t items;
  int lanes_shift;  // 2 to the power of it lanes take a row

  RotaryProblem(const RotaryOperands<Element, Table>& operands,
                const RotaryShape& shape, int packet)
      : operands(operands),
        shape(shape),
        rows(shape.row_count()),
        turned_items(shape.half / packet),
        items(turned_items + (shape.inner - 2 * shape.half) / packet),
        lanes_shift(0) {
    for (int dimension = 0; dimension < shape.rows_of.count; ++dimension) {
      const int64_t size = shape.rows_of.sizes[dimension];
      sizes[dimension] = Divisor(size > 0 ? size : 1);
    }
    while ((1 << lanes_shift) < items && (1 << lanes_shift) < kWarp) {
      ++lanes_shift;
    }
  }

  __host__ __device__ int64_t block_count() const {
    const int64_t rows_of_block = kRotaryThreads >> lanes_shift;
    return items == 0 ? 0 : ceil_div(rows, rows_of_block);
  }
};

// Whether packets of so many elements, or what 16 bytes hold of them, begin at
// aligned addresses in every row.
template <class Element>
bool has_aligned_packets(const Element* data, const BatchSizes& rows_of,
                         const BatchStrides& strides, int64_t step,
                         int packet) {
  constexpr int kMost = 16 / static_cast<int>(sizeof(Element));
  const int together = packet < kMost ? packet : kMost;
  bool aligned = step == 1 && is_aligned(data, together);
  for (int dimension = 0; dimension < rows_of.count; ++dimension) {
    aligned &= strides.strides[dimension] % together == 0;
  }
  return aligned;
}

template <class Element, class Table>
bool takes_packets(const RotaryOperands<Element, Table>& operands,
                   const RotaryShape& shape) {
  constexpr int kPacket = kRotaryPacket<Element>;
  const auto is_fit = [&](const auto* data, int operand) {
    return has_aligned_packets(data, shape.rows_of, shape.row_strides[operand],
                               shape.steps[operand], kPacket);
  };
  return shape.half % kPacket == 0 && shape.inner % kPacket == 0 &&
         is_fit(operands.output, 0) && is_fit(operands.input, 1) &&
         is_fit(operands.cos, 2) && is_fit(operands.sin, 3);
}

// kCount neighbours, by instructions of up to 16 bytes each.
template <int kCount, class Element, class Number>
__device__ __forceinline__ void load_numbers(const Element* from,
                                             Number* numbers) {
  constexpr int kMost = 16 / static_cast<int>(sizeof(Element));
  constexpr int kTogether = kCount < kMost ? kCount : kMost;
  PKG_UNROLL
  for (int i = 0; i < kCount; i += kTogether) {
    const auto packet =
        *reinterpret_cast<const Packet<Element, kTogether>*>(from + i);
    PKG_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      numbers[i + j] = convert<Number>(packet.values[j]);
    }
  }
}

template <int kCount, class Element, class Number>
__device__ __forceinline__ void store_numbers(Element* to,
                                              const Number* numbers) {
  Packet<Element, kCount> packet;
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    packet.values[i] = convert<Element>(numbers[i]);
  }
  *reinterpret_cast<Packet<Element, kCount>*>(to) = packet;
}

// Two packets of a row: the pairs are of neighbours, or of one packet with the
// other.
template <bool kNeighbours, int kCount, class Number>
__device__ __forceinline__ void turn_pairs(Number* values, const Number* cos,
                                           const Number* sin) {
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    Number& first = values[kNeighbours ? 2 * i : i];
    Number& second = values[kNeighbours ? 2 * i + 1 : kCount + i];
    const Number x = first;
    const Number y = second;
    first = x * cos[i] - y * sin[i];
    second = y * cos[i] + x * sin[i];
  }
}

// What a lane does with a row; kPacket above 1 goes with steps of 1.
template <class Element, class Table, int kPacket>
struct RotaryRow {
  using Number = Accumulator<Element>;
  const RotaryShape& shape;
  RotaryOperands<Element, Table> at;

  __device__ __forceinline__ int64_t step(int operand) const {
    return kPacket > 1 ? 1 : shape.steps[operand];
  }

  __device__ __forceinline__ void turn(int64_t item) const {
    const int64_t pair = item * kPacket;
    const int64_t first = shape.has_neighbours ? 2 * pair : pair;
    const int64_t second =
        first + (shape.has_neighbours ? kPacket : shape.half);
    Number values[2 * kPacket];
    Number cos[kPacket];
    Number sin[kPacket];
    load_numbers<kPacket>(at.input + first * step(1), values);
    load_numbers<kPacket>(at.input + second * step(1), values + kPacket);
    load_numbers<kPacket>(at.cos + pair * step(2), cos);
    load_numbers<kPacket>(at.sin + pair * step(3), sin);
    PKG_UNROLL
    for (int i = 0; i < kPacket; ++i) {
      sin[i] = shape.turns_back ? -sin[i] : sin[i];
    }
    if (shape.has_neighbours) {
      turn_pairs<true, kPacket>(values, cos, sin);
    } else {
      turn_pairs<false, kPacket>(values, cos, sin);
    }
    store_numbers<kPacket>(at.output + first * step(0), values);
    store_numbers<kPacket>(at.output + second * step(0), values + kPacket);
  }

  __device__ __forceinline__ void copy(int64_t item) const {
    using Elements = Packet<Element, kPacket>;
    const int64_t element = 2 * shape.half + item * kPacket;
    *reinterpret_cast<Elements*>(at.output + element * step(0)) =
        *reinterpret_cast<const Elements*>(at.input + element * step(1));
  }
};

template <class Element, class Table, class Divisor>
__device__ __forceinline__ RotaryOperands<Element, Table> operands_of_row(
    const RotaryProblem<Element, Table, Divisor>& problem, int64_t row) {
  using Index = decltype(problem.sizes[0].divide(0).quotient);
  const RotaryShape& shape = problem.shape;
  int64_t offsets[kRotaryOperands] = {};
  auto rest = static_cast<Index>(row);
  PKG_UNROLL_BY(1)
  for (int dimension = shape.rows_of.count - 1; dimension >= 0; --dimension) {
    const auto divided = problem.sizes[dimension].divide(rest);
    rest = divided.quotient;
    PKG_UNROLL
    for (int operand = 0; operand < kRotaryOperands; ++operand) {
      offsets[operand] += static_cast<int64_t>(divided.remainder) *
                          shape.row_strides[operand].strides[dimension];
    }
  }
  const auto& all = problem.operands;
  return {all.output + offsets[0], all.input + offsets[1], all.cos + offsets[2],
          all.sin + offsets[3]};
}

template <class Element, class Table, class Divisor, int kPacket>
__global__ void __launch_bounds__(kRotaryThreads) rotary_embedding_kernel(
    const __grid_constant__ RotaryProblem<Element, Table, Divisor> problem) {
  const int lanes = 1 << problem.lanes_shift;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t rows_at_once = global_thread_count() >> problem.lanes_shift;
  for (int64_t index = global_thread_index() >> problem.lanes_shift;
       index < problem.rows; index += rows_at_once) {
    const RotaryRow<Element, Table, kPacket> row{
        problem.shape, operands_of_row(problem, index)};
    for (int64_t item = lane; item < problem.items; item += lanes) {
      if (item < problem.turned_items) {
        row.turn(item);
      } else {
        row.copy(item - problem.turned_items);
      }
    }
  }
}

}  // namespace pkg::cuda
