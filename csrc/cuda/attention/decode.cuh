// Attention of a few queries against a cache of keys and values.
//
// Algorithm: the keys of a sequence are split among blocks (Dao and others,
// "Flash-Decoding", 2023), so that few sequences keep the device busy. A block
// takes up to 8 of the rows that share a key head and one part of the keys, 64
// at a time: scores, eight neighbouring lanes to a key, so that they read whole
// segments of memory; the online softmax, a warp to a row; weighted sums of the
// values, neighbouring threads on neighbouring columns. A second kernel
// combines the parts in their order. The parts follow the length of each
// sequence, which only the device knows.
//
// Tiles: 64 keys; 1 or 8 rows, 64 or 128 columns of the output: blocks of a
// wider output repeat the scores. In float32 a block takes 18 KiB of shared
// memory, so that several fit a multiprocessor.
//
// 2 (head_size + value_size) operations for a row and key, and as many elements
// to read for each key head.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kDecodeThreads = 256;
constexpr int kDecodeTile = 64;   // keys
constexpr int kDecodeLanes = 8;   // threads of a key
constexpr int kDecodeSlice = 64;  // elements of the head held at a time
// Rows of a block where one is not enough.
constexpr int kDecodeRows = 8;

// int32 or int64; at most two dimensions.
struct DecodeIndices {
  const void* data;
  int64_t strides[2];
  bool is_wide;

  __device__ __forceinline__ int64_t at(int64_t i, int64_t j = 0) const {
    const int64_t offset = i * strides[0] + j * strides[1];
    return is_wide ? static_cast<const int64_t*>(data)[offset]
                   : static_cast<const int32_t*>(data)[offset];
  }
};

// A tensor (sequences or pages, heads, keys or rows, elements).
template <class Element>
struct DecodeTensor {
  Element* data;
  int64_t strides[4];
};

// ALiBi's slopes, of each sequence and query head.
struct DecodeSlopes {
  const void* data;  // null without
  int64_t strides[2];
  bool is_single;  // float32, else of the queries' type
};

template <class Element>
struct DecodeAttention {
  using Number = Accumulator<Element>;
  int64_t batch;
  int64_t key_heads;
  int64_t group;  // query heads that share a key head
  int64_t rows;   // of one head
  int64_t head_size;
  int64_t value_size;
  int64_t capacity;
  int64_t page_size;  // 0: not paged
  int64_t pages;
  int64_t splits;
  double scale;
  DecodeTensor<const Element> query;
  DecodeTensor<const Element> key;
  DecodeTensor<const Element> value;
  DecodeTensor<Element> output;  // its columns are neighbours
  DecodeIndices lengths;
  DecodeIndices table;
  // Of several splits: maximum and sum, and weighted sums of the values, of
  // each sequence, key head, split and row.
  Accumulator<Element>* states;
  Accumulator<Element>* sums;
  int64_t window_left = -1;  // keys before its own that a row sees; -1: all
  Number softcap = 0;        // 0 where scores are not capped
  DecodeSlopes slopes = {};

  __host__ __device__ int64_t shared_rows() const { return group * rows; }

  template <int kRows, int kWidth>
  __host__ __device__ int64_t piece_count() const {
    return batch * key_heads * splits * tiles_of(shared_rows(), kRows) *
           output_tiles<kWidth>();
  }
  template <int kWidth>
  __host__ __device__ int64_t output_tiles() const {
    return tiles_of(value_size, kWidth);
  }
  __host__ __device__ int64_t result_count() const {
    return batch * key_heads * shared_rows() * value_size;
  }
  __host__ __device__ int64_t part_count() const {
    return batch * key_heads * splits * shared_rows();
  }

  // What is out of range is taken to be the nearest length that is not.
  __device__ __forceinline__ int64_t length(int64_t sequence) const {
    const int64_t given = lengths.at(sequence);
    return given < 0 ? 0 : given > capacity ? capacity : given;
  }

  // How many keys a row sees; negative for none.
  __device__ __forceinline__ int64_t seen(int64_t length, int64_t row) const {
    return length - rows + row % rows + 1;
  }

  // Whether the window lets a row that sees so many keys see this one of them.
  __device__ __forceinline__ bool in_window(int64_t key, int64_t seen) const {
    return window_left < 0 || key >= seen - 1 - window_left;
  }

  // The first tile of keys that any row sees.
  __device__ __forceinline__ int64_t first_key(int64_t length) const {
    const int64_t first = length - rows - window_left;
    return window_left < 0 || first < 0 ? 0 : first / kDecodeTile * kDecodeTile;
  }

  // A scaled product as the score of a key for a row that sees so many of them.
  __device__ __forceinline__ Accumulator<Element> modified(
      Accumulator<Element> score, int64_t sequence, int64_t head, int64_t row,
      int64_t distance) const {
    if (softcap > Number(0)) {
      score = softcap * tanh(score / softcap);
    }
    if (slopes.data != nullptr) {
      const int64_t at = sequence * slopes.strides[0] +
                         (head * group + row / rows) * slopes.strides[1];
      const Number slope =
          slopes.is_single
              ? convert<Number>(static_cast<const float*>(slopes.data)[at])
              : convert<Number>(static_cast<const Element*>(slopes.data)[at]);
      score -= slope * static_cast<Number>(distance);
    }
    return score;
  }

  // The sequence or page and the place in it of a key; false where there is no
  // such page.
  __device__ __forceinline__ bool find(int64_t sequence, int64_t key,
                                       int64_t& outer, int64_t& inner) const {
    if (page_size == 0) {
      outer = sequence;
      inner = key;
      return true;
    }
    outer = table.at(sequence, key / page_size);
    inner = key % page_size;
    return outer >= 0 && outer < pages;
  }

  // The offset of a row of a key head in the query or the output.
  __device__ __forceinline__ int64_t row_offset(const int64_t (&strides)[4],
                                                int64_t sequence, int64_t head,
                                                int64_t row) const {
    return sequence * strides[0] + (head * group + row / rows) * strides[1] +
           row % rows * strides[2];
  }
};

template <class Element, int kRows, int kWidth>
__global__ void __launch_bounds__(kDecodeThreads) decode_attention_kernel(
    const __grid_constant__ DecodeAttention<Element> call) {
  using Number = Accumulator<Element>;
  constexpr int kKeysAtOnce = kDecodeThreads / kDecodeLanes;
  constexpr int kThreadKeys = kDecodeTile / kKeysAtOnce;
  constexpr int kParts = kDecodeThreads / kWidth;
  static_assert(kRows * kWarp <= kDecodeThreads && kDecodeTile == 2 * kWarp);
  PKG_SHARED(Number, query, [kRows][kDecodeSlice]);
  PKG_SHARED(Number, weights, [kRows][kDecodeTile]);
  PKG_SHARED(Number, corrections, [kRows]);
  PKG_SHARED(Number, parts, [kRows][kParts][kWidth]);
  // Where a key's row lies in the caches, -1 where there is none.
  PKG_SHARED(int64_t, key_offsets, [kDecodeTile]);
  PKG_SHARED(int64_t, value_offsets, [kDecodeTile]);

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const int key_lane = thread % kDecodeLanes;
  const int column_lane = thread % kWidth;
  const int part = thread / kWidth;
  const int64_t row_tiles = tiles_of(call.shared_rows(), kRows);
  const int64_t output_tiles = call.template output_tiles<kWidth>();
  const int64_t pieces = call.template piece_count<kRows, kWidth>();
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    int64_t rest = piece;
    const int64_t output_begin = rest % output_tiles * kWidth;
    rest /= output_tiles;
    const int64_t row_begin = rest % row_tiles * kRows;
    rest /= row_tiles;
    const int64_t split = rest % call.splits;
    rest /= call.splits;
    const int64_t head = rest % call.key_heads;
    const int64_t sequence = rest / call.key_heads;

    const int64_t length = call.length(sequence);
    const int64_t first_key = call.first_key(length);
    const int64_t part_keys =
        tiles_of(tiles_of(length - first_key, kDecodeTile),
                 static_cast<int>(call.splits)) *
        kDecodeTile;
    const int64_t key_begin = first_key + split * part_keys;
    const int64_t key_end =
        length < key_begin + part_keys ? length : key_begin + part_keys;
    const int64_t column = output_begin + column_lane;
    const bool has_column = column < call.value_size;

    Number maximum = -Number(INFINITY);  // of the warp's row
    Number sum = 0;
    Number sums[kRows];
    int64_t seen[kRows];
    PKG_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
      seen[r] = row_begin + r < call.shared_rows()
                    ? call.seen(length, row_begin + r)
                    : 0;
    }
    for (int64_t begin = key_begin; begin < key_end; begin += kDecodeTile) {
      if (thread < kDecodeTile) {
        int64_t outer = 0;
        int64_t inner = 0;
        const bool exists = begin + thread < key_end &&
                            call.find(sequence, begin + thread, outer, inner);
        key_offsets[thread] = exists ? outer * call.key.strides[0] +
                                           head * call.key.strides[1] +
                                           inner * call.key.strides[2]
                                     : -1;
        value_offsets[thread] = exists ? outer * call.value.strides[0] +
                                             head * call.value.strides[1] +
                                             inner * call.value.strides[2]
                                       : -1;
      }

      Number products[kThreadKeys][kRows];
      PKG_UNROLL
      for (int k = 0; k < kThreadKeys; ++k) {
        PKG_UNROLL
        for (int r = 0; r < kRows; ++r) {
          products[k][r] = 0;
        }
      }
      for (int64_t slice = 0; slice < call.head_size; slice += kDecodeSlice) {
        // A head of one slice stays for all tiles.
        if (begin == key_begin || call.head_size > kDecodeSlice) {
          for (int i = thread; i < kRows * kDecodeSlice; i += kDecodeThreads) {
            const int64_t row = row_begin + i / kDecodeSlice;
            const int64_t element = slice + i % kDecodeSlice;
            const bool exists =
                row < call.shared_rows() && element < call.head_size;
            query[i / kDecodeSlice][i % kDecodeSlice] =
                exists
                    ? convert<Number>(
                          call.query.data[call.row_offset(call.query.strides,
                                                          sequence, head, row) +
                                          element * call.query.strides[3]])
                    : Number(0);
          }
        }
        __syncthreads();
        PKG_UNROLL
        for (int k = 0; k < kThreadKeys; ++k) {
          const int64_t offset =
              key_offsets[k * kKeysAtOnce + thread / kDecodeLanes];
          PKG_UNROLL
          for (int e = 0; e < kDecodeSlice / kDecodeLanes; ++e) {
            const int place = e * kDecodeLanes + key_lane;
            const bool exists = offset >= 0 && slice + place < call.head_size;
            const Number element =
                exists ? convert<Number>(
                             call.key.data[offset + (slice + place) *
                                                        call.key.strides[3]])
                       : Number(0);
            PKG_UNROLL
            for (int r = 0; r < kRows; ++r) {
              products[k][r] += element * query[r][place];
            }
          }
        }
        if (call.head_size > kDecodeSlice) {
          __syncthreads();
        }
      }
      if (call.head_size == 0) {
        __syncthreads();
      }
      PKG_UNROLL
      for (int k = 0; k < kThreadKeys; ++k) {
        const int key = k * kKeysAtOnce + thread / kDecodeLanes;
        PKG_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const Number product = lanes_sum<kDecodeLanes>(products[k][r]);
          if (key_lane == 0) {
            const bool sees = key_offsets[key] >= 0 && begin + key < seen[r] &&
                              call.in_window(begin + key, seen[r]);
            weights[r][key] =
                sees ? call.modified(product * static_cast<Number>(call.scale),
                                     sequence, head, row_begin + r,
                                     seen[r] - 1 - begin - key)
                     : -Number(INFINITY);
          }
        }
      }
      __syncthreads();

      // The maximum ignores NaN, the sum does not.
      if (warp < kRows) {
        const Number low = weights[warp][lane];
        const Number high = weights[warp][lane + kWarp];
        const Number previous = maximum;
        maximum = fmax(previous, lanes_maximum<kWarp>(fmax(low, high)));
        const Number origin =
            maximum == -Number(INFINITY) ? Number(0) : maximum;
        const Number correction = exp(previous - origin);
        const Number low_weight = exp(low - origin);
        const Number high_weight = exp(high - origin);
        sum = sum * correction + lanes_sum<kWarp>(low_weight + high_weight);
        weights[warp][lane] = low_weight;
        weights[warp][lane + kWarp] = high_weight;
        if (lane == 0) {
          corrections[warp] = correction;
        }
      }
      __syncthreads();

      PKG_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[r] *= static_cast<Number>(corrections[r]);
      }
      PKG_UNROLL_BY(4)
      for (int key = part; key < kDecodeTile; key += kParts) {
        const int64_t offset = value_offsets[key];
        if (offset >= 0 && has_column) {
          const Number element = convert<Number>(
              call.value.data[offset + column * call.value.strides[3]]);
          PKG_UNROLL
          for (int r = 0; r < kRows; ++r) {
            // A value that the row does not see may be NaN.
            sums[r] +=
                begin + key < seen[r] && call.in_window(begin + key, seen[r])
                    ? element * weights[r][key]
                    : Number(0);
          }
        }
      }
      __syncthreads();
    }

    PKG_UNROLL
    for (int r = 0; r < kRows; ++r) {
      parts[r][part][column_lane] = sums[r];
    }
    if (warp < kRows && lane == 0) {
      weights[warp][0] = maximum;
      weights[warp][1] = sum;
    }
    __syncthreads();
    if (part == 0 && has_column) {
      PKG_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = row_begin + r;
        if (row < call.shared_rows()) {
          Number total = parts[r][0][column_lane];
          PKG_UNROLL
          for (int p = 1; p < kParts; ++p) {
            total += parts[r][p][column_lane];
          }
          const Number row_sum = weights[r][1];
          if (call.splits == 1) {
            call.output.data[call.row_offset(call.output.strides, sequence,
                                             head, row) +
                             column * call.output.strides[3]] =
                convert<Element>(row_sum == Number(0) ? Number(0)
                                                      : total / row_sum);
          } else {
            const int64_t index =
                ((sequence * call.key_heads + head) * call.splits + split) *
                    call.shared_rows() +
                row;
            call.sums[index * call.value_size + column] = total;
            if (column == 0) {
              call.states[2 * index] = weights[r][0];
              call.states[2 * index + 1] = row_sum;
            }
          }
        }
      }
    }
    __syncthreads();
  }
}

// A thread to each element of the output.
template <class Element>
__global__ void __launch_bounds__(kDecodeThreads) decode_attention_combine(
    const __grid_constant__ DecodeAttention<Element> call) {
  using Number = Accumulator<Element>;
  const int64_t rows = call.shared_rows();
  const int64_t results = call.result_count();
  for (int64_t result = global_thread_index(); result < results;
       result += global_thread_count()) {
    const int64_t column = result % call.value_size;
    const int64_t row = result / call.value_size % rows;
    const int64_t head = result / call.value_size / rows;
    const int64_t first = head * call.splits * rows + row;
    Number maximum = -Number(INFINITY);
    for (int64_t split = 0; split < call.splits; ++split) {
      maximum = fmax(maximum, call.states[2 * (first + split * rows)]);
    }
    const Number origin = maximum == -Number(INFINITY) ? Number(0) : maximum;
    Number sum = 0;
    Number total = 0;
    for (int64_t split = 0; split < call.splits; ++split) {
      const int64_t index = first + split * rows;
      const Number factor = exp(call.states[2 * index] - origin);
      sum += call.states[2 * index + 1] * factor;
      total += call.sums[index * call.value_size + column] * factor;
    }
    call.output.data[call.row_offset(call.output.strides, head / call.key_heads,
                                     head % call.key_heads, row) +
                     column * call.output.strides[3]] =
        convert<Element>(sum == Number(0) ? Number(0) : total / sum);
  }
}

}  // namespace pkg::cuda
