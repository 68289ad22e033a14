// The loop of every pointwise CPU operator: contiguous runs are handed to the
// operator in place; runs that are strided, broadcast or of another dtype are
// first gathered into a buffer of kChunk elements, which stays in the L1 cache.
//
// Bound: memory. An operator with k inputs moves (k + 1) * sizeof(T) bytes an
// element and does a few operations on it.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/runtime/element_types.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/pointwise.h"

namespace pkg::cpu {

inline constexpr int64_t kChunk = 512;

template <class T>
inline constexpr ScalarType scalar_type_of =
    torch::headeronly::CppTypeToScalarType<T>::value;

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<simd::Compute<To>>(
        static_cast<simd::Compute<From>>(value)));
  }
}

// A bool is read as a byte: a tensor may hold others than 0 and 1, which a C++
// bool may not.
template <class T>
T element_at(const T* from, int64_t index) {
  if constexpr (std::is_same_v<T, bool>) {
    return reinterpret_cast<const uint8_t*>(from)[index] != 0;
  } else {
    return from[index];
  }
}

struct Source {
  const char* data;
  ScalarType type;
};

struct Destination {
  char* data;
  ScalarType type;
};

template <class Output>
Destination destination_of(const Output& output) {
  return {static_cast<char*>(output.mutable_data_ptr()), dtype_of(output)};
}

// Elements of any type, `stride` apart, as contiguous elements of T in `to`;
// and the way back. In cpu/pointwise/pointwise.cpp, for all pairs of element
// types.
template <class T>
void gather_run(const Source& source, int64_t offset, int64_t stride,
                int64_t count, T* to);
template <class T>
void scatter_run(const Destination& destination, int64_t offset, int64_t stride,
                 int64_t count, const T* from);

// `count` elements from `offset` on as contiguous elements of type T: in place
// where they are, else converted into `buffer`.
template <class T>
const T* contiguous_run(const Source& source, int64_t offset, int64_t stride,
                        int64_t count, T* buffer) {
  if (stride == 1 && source.type == scalar_type_of<T>) {
    return reinterpret_cast<const T*>(source.data) + offset;
  }
  gather_run(source, offset, stride, count, buffer);
  return buffer;
}

// Several registers, for an operation that does each step for all of them
// (simd::each says why): it says for how many, as kTogether, and takes and
// returns one, too.
template <class V, size_t kCount>
struct Registers {
  V at[kCount];
};

template <size_t kCount, class T>
[[gnu::always_inline]] inline auto load_registers(const T* from) {
  using C = simd::Compute<T>;
  Registers<simd::Vector<C>, kCount> registers;
  simd::each<kCount>([&](size_t i) {
    registers.at[i] = simd::load(from + i * simd::kLanes<C>);
  });
  return registers;
}

template <class V, size_t kCount, class T>
[[gnu::always_inline]] inline void store_registers(
    T* to, const Registers<V, kCount>& registers) {
  simd::each<kCount>([&](size_t i) {
    simd::store(to + i * simd::kLanes<simd::Compute<T>>, registers.at[i]);
  });
}

// Applies to contiguous runs, as far as whole groups of registers go; from the
// element that is returned on nothing is done.
template <class T, class Operation, class... Inputs>
int64_t apply_to_groups(int64_t count, T* output, const Operation& operation,
                        const Inputs*... inputs) {
  constexpr size_t kTogether = Operation::kTogether;
  constexpr int64_t kStep = kTogether * simd::kLanes<simd::Compute<T>>;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    store_registers(output + i,
                    operation(load_registers<kTogether>(inputs + i)...));
  }
  return i;
}

// Applies `operation`, which takes and returns vectors or scalars of Compute<T>
// alike, or registers, to contiguous runs.
template <class T, class Operation, class... Inputs>
void apply_to_run(int64_t count, T* output, const Operation& operation,
                  const Inputs*... inputs) {
  if constexpr (std::is_floating_point_v<simd::Compute<T>>) {
    constexpr int64_t kLanes = simd::kLanes<simd::Compute<T>>;
    constexpr bool kTakesGroups = requires { Operation::kTogether; };
    const auto apply = [&](const auto&... vectors) {
      if constexpr (kTakesGroups) {
        return operation(
                   Registers<std::decay_t<decltype(vectors)>, 1>{vectors}...)
            .at[0];
      } else {
        return operation(vectors...);
      }
    };
    int64_t i = 0;
    if constexpr (kTakesGroups) {
      i = apply_to_groups(count, output, operation, inputs...);
    }
    for (; i + kLanes <= count; i += kLanes) {
      simd::store(output + i, apply(simd::load(inputs + i)...));
    }
    if (i < count) {
      const int rest = static_cast<int>(count - i);
      simd::store_partial(output + i,
                          apply(simd::load_partial(inputs + i, rest)...), rest);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      output[i] = static_cast<T>(operation(element_at(inputs, i)...));
    }
  }
}

// Walks a PointwiseLoop from a linear position on, run by run.
template <int kOperands>
class RunWalker {
 public:
  RunWalker(const PointwiseLoop<kOperands>& loop, int64_t position)
      : loop_(loop) {
    for (int d = 0; d < loop.dims; ++d) {
      index_[d] = position % loop.sizes[d];
      position /= loop.sizes[d];
      for (int operand = 0; operand < kOperands; ++operand) {
        offsets_[operand] += index_[d] * loop.strides[operand][d];
      }
    }
  }

  int64_t offset(int operand) const { return offsets_[operand]; }
  int64_t inner_stride(int operand) const {
    return loop_.dims == 0 ? 1 : loop_.strides[operand][0];
  }
  int64_t left_in_run() const {
    return loop_.dims == 0 ? 1 : loop_.sizes[0] - index_[0];
  }

  void advance(int64_t count) {
    for (int d = 0; d < loop_.dims; ++d) {
      const int64_t step = d == 0 ? count : 1;
      index_[d] += step;
      for (int operand = 0; operand < kOperands; ++operand) {
        offsets_[operand] += step * loop_.strides[operand][d];
      }
      if (index_[d] < loop_.sizes[d]) {
        return;
      }
      index_[d] = 0;
      for (int operand = 0; operand < kOperands; ++operand) {
        offsets_[operand] -= loop_.sizes[d] * loop_.strides[operand][d];
      }
    }
  }

 private:
  const PointwiseLoop<kOperands>& loop_;
  std::array<int64_t, kMaxDims> index_;
  std::array<int64_t, kOperands> offsets_{};
};

// output = operation(inputs...), computed in the dtype of T. An output of
// another dtype, or a strided one, is computed in a buffer and converted while
// it is stored.
template <class T, class Operation, size_t kInputs>
void run_pointwise(const PointwiseLoop<static_cast<int>(kInputs) + 1>& loop,
                   const Destination& destination,
                   const std::array<const TensorView*, kInputs>& inputs,
                   const Operation& operation) {
  constexpr int kOperands = static_cast<int>(kInputs) + 1;
  const bool same_type = destination.type == scalar_type_of<T>;
  std::array<Source, kInputs> sources;
  for (size_t i = 0; i < kInputs; ++i) {
    sources[i] = {static_cast<const char*>(inputs[i]->const_data_ptr()),
                  dtype_of(*inputs[i])};
  }
  parallel_for(loop.numel(), kElementGrain, [&](int64_t begin, int64_t end) {
    alignas(64) T buffers[kInputs][kChunk];
    alignas(64) T results[kChunk];
    RunWalker<kOperands> walker(loop, begin);
    const bool in_place = same_type && walker.inner_stride(0) == 1;
    bool are_all_in_place = in_place;
    for (size_t i = 0; i < kInputs; ++i) {
      are_all_in_place = are_all_in_place &&
                         sources[i].type == scalar_type_of<T> &&
                         walker.inner_stride(static_cast<int>(i) + 1) == 1;
    }
    const int64_t most = are_all_in_place ? end - begin : kChunk;
    while (begin < end) {
      const int64_t count = std::min({most, walker.left_in_run(), end - begin});
      T* result =
          in_place ? reinterpret_cast<T*>(destination.data) + walker.offset(0)
                   : results;
      [&]<size_t... i>(std::index_sequence<i...>) {
        apply_to_run(count, result, operation,
                     contiguous_run<T>(sources[i], walker.offset(i + 1),
                                       walker.inner_stride(i + 1), count,
                                       buffers[i])...);
      }(std::make_index_sequence<kInputs>{});
      if (!in_place) {
        scatter_run(destination, walker.offset(0), walker.inner_stride(0),
                    count, results);
      }
      walker.advance(count);
      begin += count;
    }
  });
}

}  // namespace pkg::cpu
