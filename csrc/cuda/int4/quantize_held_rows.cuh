// quantize_rowwise of rows that are whole packets of 16 bytes from aligned
// addresses on, and not too many of them: a group of threads takes a row and
// holds it in registers, each thread up to kHeldPackets packets, which it loads
// before it looks at the first. The largest magnitudes are shared by shuffles,
// and among the warps of a group, which is a block then, in shared memory. The
// values are made of what the registers hold, and written as many at a time as
// a packet has. Bytes: the input once, and the values once. (4096 by 14336 of
// bfloat16 took an H100 64 us, 2.76 TB/s of the 2.98 that it copies; in two
// passes 111.)
//
// Of float16, bfloat16 and float32 whose scale does not allow its reciprocal
// (zero, not finite, or too far from one) the row is read once more, an element
// at a time: the divisions of all packets would be the larger part of the code.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/int4/quantize_rowwise.cuh"

namespace pkg::cuda {

constexpr int kHeldPackets = 8;

// Rows of up to kMostPackets, each of a group of kGroup threads.
template <class Element, int kGroup>
struct HeldRows {
  static constexpr int kThreads =
      kGroup < kQuantizeThreads ? kQuantizeThreads : kGroup;
  static constexpr int kRows = kThreads / kGroup;
  static constexpr int kWarps = kGroup / kWarp;
  static constexpr int64_t kMostPackets = kGroup * kHeldPackets;
  static constexpr int kSharedBytes = 0;  // beyond what the kernel declares
  // A thread has 64 registers, 32 of them for its packets; divisions of
  // float64 take more.
  static constexpr int kBlocks = (sizeof(Element) == 8 ? 512 : 1024) / kThreads;
  static_assert(kRows == 1 || kWarps == 1, "rows share no barrier");
};

// One row, as its threads hold it.
template <class Element, int kGroup>
struct HeldRow {
  static constexpr int kPacket = QuantizeRow<Element>::kPacket;
  using Number = Accumulator<Element>;
  using Elements = Packet<Element, kPacket>;
  using Words = Packet<int, 4>;
  static_assert(sizeof(Words) == sizeof(Elements));
  Words packets[kHeldPackets];  // as words: a half alone takes a register
  int count;                    // of the row's packets
  int thread;                   // of the group

  __device__ __forceinline__ HeldRow(const QuantizeRow<Element>& row,
                                     int thread)
      : count(static_cast<int>(row.packets)), thread(thread) {
    const auto* const from = reinterpret_cast<const Words*>(row.data);
    for_each([&](int i, int at) { packets[i] = from[at]; });
  }

  // Calls function(i, at) for each packet i that the thread has, which is
  // packet `at` of the row.
  template <class Function>
  __device__ __forceinline__ void for_each(Function&& function) const {
    PKG_UNROLL
    for (int i = 0; i < kHeldPackets; ++i) {
      const int at = thread + i * kGroup;
      if (at < count) {
        function(i, at);
      }
    }
  }

  __device__ __forceinline__ Elements packet(int i) const {
    Elements elements;
    memcpy(&elements, &packets[i], sizeof(elements));
    return elements;
  }

  __device__ __forceinline__ LargestMagnitudes<Number> largest() const {
    LargestMagnitudes<Number> result;
    for_each([&](int i, int) {
      const Elements elements = packet(i);
      PKG_UNROLL
      for (int j = 0; j < kPacket; ++j) {
        result.take(convert<Number>(elements.values[j]));
      }
    });
    return result;
  }

  // What was computed of the elements is computed again where it is used: as
  // numbers of float32 those of half precision take twice the registers.
  __device__ __forceinline__ void forget_numbers() {
    PKG_UNROLL
    for (Words& words : packets) {
      PKG_UNROLL
      for (int& word : words.values) {
        word = computed_here(word);
      }
    }
  }

  template <int kPerByte, class Quantizer>
  __device__ __forceinline__ void store(const QuantizeRow<Element>& row,
                                        const Quantizer& quantize,
                                        int8_t* to) const {
    if constexpr (Quantizer::kTakesPackets) {
      for_each([&](int i, int at) {
        store_bytes(to + at * (kPacket / kPerByte),
                    quantized_packet<kPerByte>(quantize, packet(i)), true);
      });
    } else {
      store_elements<kPerByte, kGroup>(row, quantize, to, 0, thread);
    }
  }

  template <bool kByReciprocal>
  __device__ __forceinline__ void store(const QuantizeProblem<Element>& problem,
                                        const QuantizeRow<Element>& row,
                                        Number scale, int64_t index) const {
    const RowQuantizer<Number, kByReciprocal> quantize(scale, problem.bits);
    if (problem.bits == 8) {
      store<1>(row, quantize, problem.values + index * problem.inner);
    } else {
      store<2>(row, quantize, problem.values + index * (problem.inner / 2));
    }
  }
};

// Those of all warps of the block, in each thread. `shared`, two numbers of a
// warp, may be written again when every thread has passed another barrier.
template <int kWarps, class Number, class Shared>
__device__ __forceinline__ void share_among_warps(
    LargestMagnitudes<Number>& largest, Shared&& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    shared[warp][0] = largest.positive;
    shared[warp][1] = largest.negative;
  }
  __syncthreads();
  PKG_UNROLL
  for (int i = 0; i < kWarps; ++i) {
    largest.take(shared[i][0], shared[i][1]);
  }
}

template <class Element, int kGroup>
__global__ void __launch_bounds__(HeldRows<Element, kGroup>::kThreads,
                                  HeldRows<Element, kGroup>::kBlocks)
    quantize_held_rows_kernel(
        const __grid_constant__ QuantizeProblem<Element> problem) {
  using Rows = HeldRows<Element, kGroup>;
  using Number = Accumulator<Element>;
  using Bits = typename LargestMagnitudes<Number>::Bits;
  PKG_SHARED(Bits, shared, [2][Rows::kWarps][2]);  // in turns
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const int64_t rows_of_grid = int64_t{gridDim.x} * Rows::kRows;
  int turn = 0;
  for (int64_t index = int64_t{blockIdx.x} * Rows::kRows + group;
       index < problem.rows; index += rows_of_grid) {
    const QuantizeRow<Element> row(problem, index);
    HeldRow<Element, kGroup> held(row, thread);
    LargestMagnitudes<Number> largest = held.largest();
    held.forget_numbers();
    largest.share();
    if constexpr (Rows::kWarps > 1) {
      share_among_warps<Rows::kWarps>(largest, shared[turn]);
      turn = 1 - turn;
    }
    const Element rounded = convert<Element>(largest.scale(problem.bits));
    if (thread == 0) {
      problem.scales[index] = rounded;
    }
    const Number scale = convert<Number>(rounded);
    if (divides_by_reciprocal(scale)) {
      held.template store<true>(problem, row, scale, index);
    } else {
      held.template store<false>(problem, row, scale, index);
    }
  }
}

// Whether every row is packets from an aligned address on, and its values are.
template <class Element>
bool has_whole_packets(const QuantizeProblem<Element>& problem) {
  constexpr int kPacket = QuantizeRow<Element>::kPacket;
  bool result = problem.stride == 1 && problem.inner % kPacket == 0 &&
                is_aligned(problem.input, kPacket) &&
                is_aligned(problem.values, kPacket);
  for (int d = 0; d < problem.rows_of.count; ++d) {
    result = result && problem.row_strides.strides[d] % kPacket == 0;
  }
  return result;
}

// Calls function.operator()<kGroup>() with the smallest group that holds a row;
// returns whether there is one.
template <class Element, class Function>
bool with_held_group(const QuantizeProblem<Element>& problem,
                     Function&& function) {
  const int64_t packets = problem.inner / QuantizeRow<Element>::kPacket;
  if (!has_whole_packets(problem) ||
      packets > HeldRows<Element, 512>::kMostPackets) {
    return false;
  }
  if (packets <= HeldRows<Element, 32>::kMostPackets) {
    function.template operator()<32>();
  } else if (packets <= HeldRows<Element, 128>::kMostPackets) {
    function.template operator()<128>();
  } else if (packets <= HeldRows<Element, 256>::kMostPackets) {
    function.template operator()<256>();
  } else {
    function.template operator()<512>();
  }
  return true;
}

}  // namespace pkg::cuda
