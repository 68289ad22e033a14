// rotary_embedding and its gradient: each pair of a row's elements times the
// matrix of a rotation, whose cosines and sines are read from tables (RoFormer,
// https://arxiv.org/abs/2104.09864). In float32 (float64 for float64), rounded
// once. Rows are taken in the order of the result's memory, by blocks that stay
// in the L1 cache. Where the rows of a block are turned alike, as the heads of
// a token are, a register of angles is loaded once and turns all of them.
//
// Bound: memory, one read and one write of the input; the tables stay in the
// cache.
#include "rotary_embedding.h"

#include <algorithm>
#include <cstring>

#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

using simd::Vector;

// Of a block of rows.
constexpr int64_t kBlockBytes = 8192;

// Rows whose elements lie side by side.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  T* at(int64_t row) const { return data + row * stride; }
};

template <class T, class Table>
struct Block {
  Rows<T> output;
  Rows<const T> input;
  Rows<const Table> cos;
  Rows<const Table> sin;
  int64_t count;
  int64_t half;
  simd::Compute<T> sign;  // of the sines

  // One of its rows.
  Block row(int64_t row) const {
    Block one = *this;
    one.output.data = output.at(row);
    one.input.data = input.at(row);
    one.cos.data = cos.at(row);
    one.sin.data = sin.at(row);
    one.count = 1;
    return one;
  }
};

// Calls turn(row, load, store) for each row, with what reads and writes a
// register of which `left` elements are left, whole or in part. Inlined, or the
// registers of angles would be read again for each row.
template <class T, class Table, class Turn>
[[gnu::always_inline]] inline void for_each_row(const Block<T, Table>& rows,
                                                int64_t left,
                                                const Turn& turn) {
  const int64_t rows_in_all = rows.count;
  const Rows<const T> input = rows.input;
  const Rows<T> output = rows.output;
  if (left >= simd::kLanes<simd::Compute<T>>) {
    for (int64_t row = 0; row < rows_in_all; ++row) {
      turn(
          input.at(row), output.at(row),
          [](const T* from) { return simd::load(from); },
          [](T* to, auto value) { simd::store(to, value); });
    }
  } else {
    const int count = static_cast<int>(left);
    for (int64_t row = 0; row < rows_in_all; ++row) {
      turn(
          input.at(row), output.at(row),
          [=](const T* from) { return simd::load_partial(from, count); },
          [=](T* to, auto value) { simd::store_partial(to, value, count); });
    }
  }
}

// Rows that are turned alike: x cos - y sin and y cos + x sin.
template <class T, class Table>
void turn_halves(const Block<T, Table>& rows) {
  constexpr int64_t kLanes = simd::kLanes<simd::Compute<T>>;
  const int64_t half = rows.half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const auto cos = simd::load_up_to(rows.cos.data + i, left);
    const auto sin = simd::load_up_to(rows.sin.data + i, left) * rows.sign;
    for_each_row(rows, left, [=](const T* from, T* to, auto load, auto store) {
      const auto x = load(from + i);
      const auto y = load(from + half + i);
      store(to + i, x * cos - y * sin);
      store(to + half + i, y * cos + x * sin);
    });
  }
}

// A register of neighbours: each of a pair times the cosine, and the other
// times the sine, of which the first is negative.
template <class T, class Table>
void turn_register(const Block<T, Table>& rows, int64_t first, int64_t left,
                   Vector<simd::Compute<T>> cos, Vector<simd::Compute<T>> sin) {
  for_each_row(rows, left, [=](const T* from, T* to, auto load, auto store) {
    const auto pairs = load(from + first);
    store(to + first, pairs * cos + simd::swap_neighbours(pairs) * sin);
  });
}

template <class T, class Table>
void turn_neighbours(const Block<T, Table>& rows) {
  constexpr int64_t kLanes = simd::kLanes<simd::Compute<T>>;
  for (int64_t i = 0; i < rows.half; i += kLanes) {
    const int64_t left = rows.half - i;
    auto cos = simd::load_up_to(rows.cos.data + i, left);
    auto same_cos = cos;
    auto sin = simd::load_up_to(rows.sin.data + i, left) * rows.sign;
    auto minus_sin = -sin;
    simd::interleave(cos, same_cos);
    simd::interleave(minus_sin, sin);
    turn_register(rows, 2 * i, 2 * left, cos, minus_sin);
    if (2 * left > kLanes) {
      turn_register(rows, 2 * i + kLanes, 2 * left - kLanes, same_cos, sin);
    }
  }
}

template <class T, class Table>
void turn_block(const RotaryEmbeddingPlan& plan, const Block<T, Table>& block) {
  if (block.count > 1 && (block.cos.stride != 0 || block.sin.stride != 0)) {
    for (int64_t row = 0; row < block.count; ++row) {
      turn_block(plan, block.row(row));
    }
    return;
  }
  if (plan.pairs == RotaryPairs::kHalves) {
    turn_halves(block);
  } else {
    turn_neighbours(block);
  }
  const int64_t turned = 2 * plan.half;
  for (int64_t row = 0; turned < plan.inner && row < block.count; ++row) {
    std::memcpy(static_cast<void*>(block.output.at(row) + turned),
                block.input.at(row) + turned,
                static_cast<size_t>(plan.inner - turned) * sizeof(T));
  }
}

struct Operands {
  Destination output;
  Source input;
  Source cos;
  Source sin;
};

// Scratch memory of a thread for rows whose elements are not side by side, and
// for tables of another type than they are computed with.
template <class T, class Table>
struct RowBuffers {
  RowBuffers(const RotaryEmbeddingPlan& plan, int64_t rows)
      : output(memory<Slot::FirstRow>().template request<T>(2 * rows *
                                                            plan.inner)),
        input(output + rows * plan.inner),
        cos(memory<Slot::SecondRow>().template request<Table>(2 * rows *
                                                              plan.half)),
        sin(cos + rows * plan.half) {}
  ~RowBuffers() {
    memory<Slot::FirstRow>().release_excess();
    memory<Slot::SecondRow>().release_excess();
  }
  RowBuffers(const RowBuffers&) = delete;
  RowBuffers& operator=(const RowBuffers&) = delete;

  template <Slot slot>
  static Workspace& memory() {
    return Workspace::of_this_thread<slot>();
  }

  T* const output;
  T* const input;
  Table* const cos;
  Table* const sin;
};

// `count` rows of `inner` elements, the first at `offset`: in place where their
// elements are side by side and of type T, else copied into `buffer`.
template <class T>
Rows<const T> rows_of(const Source& source, int64_t offset, int64_t stride,
                      int64_t step, int64_t inner, int64_t count, T* buffer) {
  if (step == 1 && source.type == scalar_type_of<T>) {
    return {reinterpret_cast<const T*>(source.data) + offset, stride};
  }
  const int64_t distinct = stride == 0 ? 1 : count;
  for (int64_t row = 0; row < distinct; ++row) {
    gather_run(source, offset + row * stride, step, inner,
               buffer + row * inner);
  }
  return {buffer, stride == 0 ? 0 : inner};
}

template <class T, class Table>
void turn_rows(const RotaryEmbeddingPlan& plan, const Operands& operands,
               int64_t begin, int64_t end) {
  const int64_t most =
      grain_of(kBlockBytes / static_cast<int64_t>(sizeof(T)), plan.inner);
  const RowBuffers<T, Table> buffers(plan, most);
  RunWalker<4> walker(plan.rows, begin);
  const auto at = [&](int operand) { return walker.offset(operand); };
  const auto stride = [&](int operand) { return walker.inner_stride(operand); };
  const auto& steps = plan.steps;
  while (begin < end) {
    const int64_t count = std::min({most, walker.left_in_run(), end - begin});
    const bool in_place = steps[0] == 1;
    const Block<T, Table> block{
        in_place ? Rows<T>{reinterpret_cast<T*>(operands.output.data) + at(0),
                           stride(0)}
                 : Rows<T>{buffers.output, plan.inner},
        rows_of(operands.input, at(1), stride(1), steps[1], plan.inner, count,
                buffers.input),
        rows_of(operands.cos, at(2), stride(2), steps[2], plan.half, count,
                buffers.cos),
        rows_of(operands.sin, at(3), stride(3), steps[3], plan.half, count,
                buffers.sin),
        count,
        plan.half,
        static_cast<simd::Compute<T>>(plan.way == RotaryWay::kForward ? 1
                                                                      : -1)};
    turn_block(plan, block);
    for (int64_t row = 0; !in_place && row < count; ++row) {
      scatter_run(operands.output, at(0) + row * stride(0), steps[0],
                  plan.inner, block.output.at(row));
    }
    walker.advance(count);
    begin += count;
  }
}

template <class T, class Table>
void run(const RotaryEmbeddingPlan& plan, const Operands& operands) {
  parallel_for(plan.rows.numel(), grain_of(kElementGrain, plan.inner),
               [&](int64_t begin, int64_t end) {
                 turn_rows<T, Table>(plan, operands, begin, end);
               });
}

Tensor run(const RotaryEmbeddingPlan& plan, const TensorView& input,
           const TensorView& cos, const TensorView& sin) {
  const auto source = [](const TensorView& tensor) {
    return Source{static_cast<const char*>(tensor.const_data_ptr()),
                  tensor.dtype};
  };
  const Operands operands{
      {static_cast<char*>(plan.output.mutable_data_ptr()), plan.type},
      source(input),
      source(cos),
      source(sin)};
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    if (plan.table_type == plan.type) {
      run<T, T>(plan, operands);
    } else {
      // Float32 is converted for float64, row by row.
      run<T, simd::Compute<T>>(plan, operands);
    }
  });
  return plan.output;
}

Tensor rotary_embedding(const TensorView& input, const TensorView& cos,
                        const TensorView& sin, bool interleaved) {
  return run(plan_rotary_embedding("rotary_embedding", "input", input, cos, sin,
                                   interleaved, RotaryWay::kForward),
             input, cos, sin);
}

Tensor rotary_embedding_backward(const TensorView& grad, const TensorView& cos,
                                 const TensorView& sin, bool interleaved) {
  return run(plan_rotary_embedding("rotary_embedding_backward", "grad", grad,
                                   cos, sin, interleaved, RotaryWay::kBack),
             grad, cos, sin);
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&rotary_embedding>("rotary_embedding");
  library.impl<&rotary_embedding_backward>("rotary_embedding_backward");
}

}  // namespace
}  // namespace pkg::cpu
