// Attention of a few queries against a cache of keys and values by tensor
// cores, of half precision.
//
// Algorithm: decode.cuh's. The rows that share a key head, 16 at a time, are
// those of an mma; most are not there, but a key and its value are read once
// for all of them. Each of a block's four warps takes 16 of every 64 keys for
// itself: it copies them, has its own maximum, sum and output, and waits for
// nobody; the four outputs are combined in their order at the end. Weights are
// rounded to the operands' type, as FlashAttention's are; the sum that they are
// divided by is that of the unrounded ones.
//
// Copies are of 16 bytes, past the registers, into one of a warp's two places
// of 16 keys and values, while those in the other one are attended to. A lane
// finds where one key or value lies, and reads the block table for it a turn
// before that.
//
// A value that some rows see and others do not may be NaN, which a weight of
// zero does not remove. Where there are such keys, at the end of a sequence and
// at the edge of a window, the values are looked at; those that are not finite
// are taken out of the product and added to the rows that see them at the end.
//
// 2 (head_size + value_size) operations for a row and key, 16 rows at the
// price of one; as many elements to read for each key head and 16 rows. Tiles
// of rows and of columns are blocks side by side, which find them in the L2
// cache.
//
// Tiles: 16 rows, 64 keys; 64, 128 or 256 columns, 16 of each warp's rows by
// all of them in registers: 138, 168 and 255 of them on 9.0. A head of 64, 128
// or 256 takes 35, 70 or 139 KiB of shared memory, so that an H200's
// multiprocessor holds 3, 3 or 1 blocks and has 48, 96 or 64 KiB on the way;
// 4.8 TB/s for a microsecond are 36.
//
// By the machine code (9.0, no pages) a turn of four warps takes 424, 611 or
// 892 cycles of the schedulers and 428, 760 or 1424 of shared memory, for 16,
// 32 or 64 KiB of the cache: 38, 43 or 46 bytes a cycle, where 132
// multiprocessors at 1.83 GHz need 20 for 4.8 TB/s. So the bound is the memory.
// (An H100 read 537 MB of caches for 16 x 32 heads on 8 of 128 in 185 us, 87 %
// of its memory's rate, and combined the parts in 6.)
#pragma once

#include <cstdint>

#include "cuda/attention/decode.cuh"
#include "cuda/attention/decode_copies.cuh"
#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/forward.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int64_t kMostDecodeHead = 256;

template <class Element, int kWidth>
class DecodeMma {
 public:
  static constexpr int kRows = 16;
  static constexpr int kThreads = kDecodeWarps * kWarp;
  // Of a multiprocessor, in the registers of as many.
  static constexpr int kBlocks = kWidth <= 128 ? 3 : 1;
  using Rows = DecodeRows<Element>;
  using Search = DecodeSearch<Element>;
  using Lines = DecodeLines<Element>;
  static constexpr int kWarpKeys = Rows::kWarpKeys;
  using Scores = Tile<float, kRows, kDecodeTile,
                      MmaThread<kRows, kDecodeTile, kRows, kWarpKeys>>;
  // The outputs of the warps, one below the other.
  using Output = Tile<float, kDecodeWarps * kRows, kWidth,
                      MmaThread<kDecodeWarps * kRows, kWidth, kRows, kWidth>>;
  using Softmax = OnlineSoftmax<Scores, FastExponential>;
  static constexpr int kInfinityWords = kWidth / 8;  // of a row
  // Of shared memory, beyond what launch_shape() says.
  static constexpr int kDeclaredBytes =
      4 * kRows * (2 * kDecodeWarps + kInfinityWords);
  static_assert(Scores::Thread::kThreads == kThreads &&
                Output::Thread::kThreads == kThreads);

  static LaunchShape launch_shape(int64_t head_size) {
    const int slices = slices_of(head_size);
    const int copied =
        (slices + kDecodeWarps * kPlaces * (slices + kValueSlices)) *
        Slice::kElements * static_cast<int>(sizeof(Element));
    const int combined =
        kDecodeWarps * kRows * kCombinedLine * static_cast<int>(sizeof(float));
    return {kThreads, copied > combined ? copied : combined};
  }

  __device__ __forceinline__ DecodeMma(const DecodeAttention<Element>& call,
                                       const DecodePiece& piece)
      : call_(call),
        piece_(piece),
        rows_(call, piece),
        slices_(slices_of(call.head_size)),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        memory_(dynamic_shared<Element>()) {}

  // The warp's output of its keys, relative to its own maximum. `infinities`
  // are words in shared memory, kInfinityWords for a row, four bits for a
  // column.
  template <class Infinities>
  __device__ __forceinline__ void run(Output& output, Softmax& softmax,
                                      Infinities& infinities) const {
    const Lines keys(call_.key, piece_.head, 0, call_.head_size);
    const Lines values(call_.value, piece_.head, piece_.output_begin,
                       call_.value_size);
    const Search search(call_, piece_, keys.data(), values.data());
    const int begin = static_cast<int>(piece_.key_begin) + warp_ * kWarpKeys;
    const int end = static_cast<int>(piece_.key_end);
    load_query();
    commit_copies();
    PKG_UNROLL
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kInfinityWords;
         i += kThreads) {
      infinities[i / kInfinityWords][i % kInfinityWords] = 0;
    }
    auto begun = search.begin(begin, rows_.least(), end);
    uint32_t next = 0;
    // The first turn only begins: its keys are those of the second. Groups of
    // copies are turns.
    PKG_UNROLL_BY(1)
    for (int first = begin - kDecodeTile, place = 1;
         first < end || first < begin;
         first += kDecodeTile, place = 1 - place) {
      const uint32_t there = next;
      const int ahead = first + kDecodeTile;
      if (first >= begin) {
        // The keys have come, and all lanes are done with those before.
        wait_for_copies<0>();
        __syncwarp();
      }
      if (ahead < end) {
        const Element* address = search.finish(begun, next);
        begun = search.begin(ahead + kDecodeTile, rows_.least(), end);
        load(keys, values, place_memory(1 - place), address, next);
      }
      commit_copies();
      if (first < begin) {
        wait_for_copies<1>();
        __syncthreads();  // the queries have come
      } else {
        attend(place_memory(place), first, there, output, softmax, infinities);
      }
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  // Combines the outputs of the warps and writes them.
  template <class Infinities>
  __device__ __forceinline__ void finish(Output& output, const Softmax& softmax,
                                         Infinities& infinities) const {
    PKG_SHARED(float, maxima, [kDecodeWarps][kRows]);
    PKG_SHARED(float, sums, [kDecodeWarps][kRows]);
    const typename Output::Thread thread;
    PKG_UNROLL
    for (int i = 0; i < Output::kThreadRows; ++i) {
      if (thread.is_first_of_row()) {
        const int row = thread.row(i) - thread.warp_row;
        maxima[warp_][row] = softmax.maximum[i];
        sums[warp_][row] = softmax.sum[i];
      }
    }
    __syncthreads();
    const FastExponential exponential;
    // Of all warps, the maximum and what its exponential is divided by.
    const auto maximum_of = [&](int row) {
      float maximum = maxima[0][row];
      PKG_UNROLL
      for (int warp = 1; warp < kDecodeWarps; ++warp) {
        maximum = fmax(maximum, static_cast<float>(maxima[warp][row]));
      }
      return maximum;
    };
    const auto factor_of = [&](int row, int warp, float maximum) {
      return exponential(maxima[warp][row] -
                         (maximum == -INFINITY ? 0.0f : maximum));
    };
    PKG_UNROLL
    for (int i = 0; i < Output::kThreadRows; ++i) {
      const int row = thread.row(i) - thread.warp_row;
      output.scale_row(i, factor_of(row, warp_, maximum_of(row)));
    }
    store_combined(output);
    __syncthreads();
    constexpr int kQuads = kWidth / 4;
    PKG_UNROLL_BY(1)
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kQuads;
         i += kThreads) {
      const int row = i / kQuads;
      const float maximum = maximum_of(row);
      float sum = 0.0f;
      PKG_UNROLL
      for (int warp = 0; warp < kDecodeWarps; ++warp) {
        sum += sums[warp][row] * factor_of(row, warp, maximum);
      }
      const int column = i % kQuads * 4;
      Four total = combined(row, column);
      add_infinities(infinities[row][column / 8] >> column % 8 * 4, total);
      write(row, column, total, maximum, sum);
    }
    __syncthreads();
  }

 private:
  using Four = Packet<float, 4>;
  static constexpr uint32_t kPositive = 1;
  static constexpr uint32_t kNegative = 2;
  static constexpr uint32_t kNan = 4;
  static constexpr int kPlaces = 2;  // of a warp's keys and values
  static constexpr int kValueSlices = kWidth / Lines::kSlice;
  static constexpr int kMostSlices = kMostDecodeHead / Lines::kSlice;
  // Rows of the combined outputs begin in other banks.
  static constexpr int kCombinedLine = kWidth + 8;
  using Slice = LinesAsOuter<Element>;
  static_assert(Slice::kElements == Lines::Layout::kElements);

  __host__ __device__ static int slices_of(int64_t head_size) {
    return static_cast<int>(tiles_of(head_size, Slice::kDepth));
  }

  __device__ __forceinline__ SharedSpan<Element> place_memory(int place) const {
    const int elements = (slices_ + kValueSlices) * Slice::kElements;
    return memory_.part(
        slices_ * Slice::kElements + (warp_ * kPlaces + place) * elements,
        elements);
  }

  __device__ __forceinline__ void load_query() const {
    const Lines lines(call_.query, 0, 0, call_.head_size);
    const int64_t left = call_.shared_rows() - piece_.row_begin;
    const uint32_t there = left < kRows ? ~(~0U << left) : 0xffffU;
    // A slice to each warp.
    PKG_UNROLL_BY(1)
    for (int slice = warp_; slice < slices_; slice += kDecodeWarps) {
      lines.template copy<1>(
          memory_.part(slice * Slice::kElements, Slice::kElements), slice,
          slice + 1, there, [&](int line) {
            return call_.query.data +
                   call_.row_offset(
                       call_.query.strides, piece_.sequence, piece_.head,
                       piece_.row_begin + (line < left ? line : 0));
          });
    }
  }

  // `address` is the lane's, of its key or value.
  __device__ __forceinline__ void load(const Lines& keys, const Lines& values,
                                       const SharedSpan<Element>& to,
                                       const Element* address,
                                       uint32_t there) const {
    const auto address_of = [&](int lane) {
      return reinterpret_cast<const Element*>(
          __shfl_sync(kWholeWarp, reinterpret_cast<uintptr_t>(address), lane));
    };
    const int elements = slices_ * Slice::kElements;
    keys.template copy<kMostSlices>(to.part(0, elements), 0, slices_, there,
                                    address_of);
    values.template copy<kValueSlices>(
        to.part(elements, kValueSlices * Slice::kElements), 0, kValueSlices,
        there, [&](int line) { return address_of(kWarp / 2 + line); });
  }

  // Attends to the 16 keys from `first` on, of which `there` are there.
  template <class Infinities>
  __device__ __forceinline__ void attend(const SharedSpan<Element>& from,
                                         int first, uint32_t there,
                                         Output& output, Softmax& softmax,
                                         Infinities& infinities) const {
    Scores scores(0);
    PKG_UNROLL
    for (int slice = 0; slice < kMostSlices; ++slice) {
      if (slice >= slices_) {
        break;
      }
      const int begin = slice * Slice::kElements;
      multiply_slices<Element, kRows, kWarpKeys>(
          scores, Slice(true), memory_.part(begin, Slice::kElements),
          Slice(false), from.part(begin, Slice::kElements));
    }
    rows_.score(scores, first, there);
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      output.scale_row(i, softmax.update_row(i, scores));
    }
    const auto values =
        from.part(slices_ * Slice::kElements, kValueSlices * Slice::kElements);
    if (rows_.divides(first)) {
      take_out_infinities(values, first, infinities);
    }
    multiply_from_registers<Element>(output, scores, ValueLines(), values);
  }

  using ValueLines = LinesAsSteps<Element, kWarpKeys>;

  // Puts zeros in the place of infinite values and NaN, and notes to which rows
  // and columns they belong.
  template <class Infinities>
  __device__ __forceinline__ void take_out_infinities(
      const SharedSpan<Element>& values, int first,
      Infinities& infinities) const {
    using Layout = SwizzledTile<Element, kWarpKeys, kWidth>;
    using Words = Packet<uint32_t, 4>;
    constexpr int kVectors = kWidth / Lines::kVector;
    PKG_UNROLL_BY(1)
    for (int i = static_cast<int>(threadIdx.x) % kWarp;
         i < kWarpKeys * kVectors; i += kWarp) {
      const int key = i / kVectors;
      const int column = i % kVectors * Lines::kVector;
      const int index = Layout::index(key, column);
      const auto words = values.template load<Words>(index);
      bool is_finite = true;
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        is_finite = is_finite && !has_infinity<Element>(words.values[word]);
      }
      if (!is_finite) {
        take_out_infinities(values, index, first + key, column, infinities);
      }
    }
    __syncwarp();
  }

  // The same of a key's sixteen bytes.
  template <class Infinities>
  __device__ __forceinline__ void take_out_infinities(
      const SharedSpan<Element>& values, int index, int key, int column,
      Infinities& infinities) const {
    PKG_UNROLL_BY(1)
    for (int i = 0; i < Lines::kVector; ++i) {
      const float value =
          convert<float>(static_cast<Element>(values[index + i]));
      if (value - value == 0.0f) {
        continue;
      }
      values[index + i] = convert<Element>(0.0f);
      const uint32_t kind = value > 0.0f   ? kPositive
                            : value < 0.0f ? kNegative
                                           : kNan;
      PKG_UNROLL_BY(1)
      for (int row = 0; row < kRows; ++row) {
        if (rows_.sees(static_cast<int>(piece_.row_begin) + row, key)) {
          atomicOr(&infinities[row][column / Lines::kVector], kind << 4 * i);
        }
      }
    }
  }

  // Lines of floats, of each warp and row, in the memory of the operands.
  __device__ __forceinline__ static int combined_index(int line, int column) {
    return (line * kCombinedLine + column) *
           static_cast<int>(sizeof(float) / sizeof(Element));
  }

  __device__ __forceinline__ void store_combined(const Output& output) const {
    const typename Output::Thread thread;
    PKG_UNROLL
    for (int i = 0; i < Output::kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Output::kThreadColumns; j += 2) {
        memory_.store(
            combined_index(thread.row(i), thread.column(j)),
            Packet<float, 2>{{output.values[i][j], output.values[i][j + 1]}});
      }
    }
  }

  // The sum of all warps for four columns of a row.
  __device__ __forceinline__ Four combined(int row, int column) const {
    Four total = memory_.template load<Four>(combined_index(row, column));
    PKG_UNROLL
    for (int warp = 1; warp < kDecodeWarps; ++warp) {
      const Four part = memory_.template load<Four>(
          combined_index(warp * kRows + row, column));
      PKG_UNROLL
      for (int i = 0; i < 4; ++i) {
        total.values[i] += part.values[i];
      }
    }
    return total;
  }

  // Adds what was taken out of the values.
  __device__ __forceinline__ static void add_infinities(uint32_t found,
                                                        Four& total) {
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t kinds = found >> 4 * i & 7;
      if (kinds != 0) {
        total.values[i] += kinds == kPositive   ? INFINITY
                           : kinds == kNegative ? -INFINITY
                                                : NAN;
      }
    }
  }

  __device__ __forceinline__ void write(int tile_row, int tile_column,
                                        const Four& total, float maximum,
                                        float sum) const {
    const int64_t row = piece_.row_begin + tile_row;
    const int64_t column = piece_.output_begin + tile_column;
    if (row >= call_.shared_rows() || column >= call_.value_size) {
      return;
    }
    if (call_.splits == 1) {
      store_results(row, column, total, sum);
      if (column == 0) {
        call_.store_log_sum_exp(piece_.sequence, piece_.head, row, maximum,
                                sum);
      }
      return;
    }
    const int64_t index = call_.part_index(piece_, row);
    store_four(call_.sums + index * call_.value_size + column,
               call_.value_size - column, total);
    if (column == 0) {
      call_.states[2 * index] = maximum;
      call_.states[2 * index + 1] = sum;
    }
  }

  // Four neighbours of the output, and what rounding takes off them.
  __device__ __forceinline__ void store_results(int64_t row, int64_t column,
                                                const Four& total,
                                                float sum) const {
    Packet<Element, 4> results;
    Packet<Element, 4> rests;
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float result = sum == 0.0f ? 0.0f : total.values[i] / sum;
      results.values[i] = convert<Element>(result);
      rests.values[i] = convert<Element>(rounded_off<Element>(result));
    }
    const int64_t offset = call_.row_offset(call_.output.strides,
                                            piece_.sequence, piece_.head, row) +
                           column;
    store_four(call_.output.data + offset, call_.value_size - column, results);
    if (call_.residual != nullptr) {
      store_four(call_.residual + offset, call_.value_size - column, rests);
    }
  }

  // The first `left` of four neighbours.
  template <class Value>
  __device__ __forceinline__ static void store_four(
      Value* to, int64_t left, const Packet<Value, 4>& four) {
    if (left >= 4 && is_aligned(to, 4)) {
      *reinterpret_cast<Packet<Value, 4>*>(to) = four;
      return;
    }
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i < left) {
        to[i] = four.values[i];
      }
    }
  }

  const DecodeAttention<Element>& call_;
  const DecodePiece& piece_;
  Rows rows_;
  int slices_;
  int warp_;
  SharedSpan<Element> memory_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(DecodeMma<Element, kWidth>::kThreads,
                                  DecodeMma<Element, kWidth>::kBlocks)
    decode_attention_mma_kernel(
        const __grid_constant__ DecodeAttention<Element> call) {
  let_next_kernel_begin();
  using Mma = DecodeMma<Element, kWidth>;
  PKG_SHARED(uint32_t, infinities, [Mma::kRows][Mma::kInfinityWords]);
  const int64_t pieces = call.template piece_count<Mma::kRows, kWidth>();
  for (int64_t index = blockIdx.x; index < pieces; index += gridDim.x) {
    const DecodePiece piece = call.template piece<Mma::kRows, kWidth>(index);
    const Mma mma(call, piece);
    typename Mma::Output output(0);
    typename Mma::Softmax softmax;
    mma.run(output, softmax, infinities);
    mma.finish(output, softmax, infinities);
  }
}

}  // namespace pkg::cuda
