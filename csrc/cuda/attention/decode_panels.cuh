// Attention of a few queries against a cache of keys and values by
// multiply-adds: of float64 and float32, and of heads that the tensor cores'
// kernel has no room for.
//
// Algorithm: decode.cuh's. A block takes up to 8 of the rows that share a key
// head and one part of the keys, 64 at a time: scores, eight neighbouring lanes
// to a key, so that they read whole segments of memory; the online softmax, a
// warp to a row; weighted sums of the values, neighbouring threads on
// neighbouring columns.
//
// Tiles: 64 keys; 1 or 8 rows, 64 or 128 columns of the output: blocks of a
// wider output repeat the scores. In float32 a block takes 18 KiB of shared
// memory, so that several fit a multiprocessor.
//
// 2 (head_size + value_size) operations for a row and key, and as many elements
// to read for each key head.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"

namespace pkg::cuda {

constexpr int kDecodeThreads = 256;
constexpr int kDecodeBlocks = 4;  // to be had for each multiprocessor
constexpr int kDecodeLanes = 8;   // threads of a key
constexpr int kDecodeSlice = 64;  // elements of the head held at a time
// Rows of a block where one is not enough.
constexpr int kDecodeRows = 8;

template <class Element, int kRows, int kWidth>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_attention_panels_kernel(
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
  const int64_t pieces = call.template piece_count<kRows, kWidth>();
  for (int64_t index = blockIdx.x; index < pieces; index += gridDim.x) {
    const DecodePiece piece = call.template piece<kRows, kWidth>(index);
    const int64_t sequence = piece.sequence;
    const int64_t head = piece.head;
    const int64_t row_begin = piece.row_begin;
    const int64_t length = piece.length;
    const int64_t key_begin = piece.key_begin;
    const int64_t key_end = piece.key_end;
    const int64_t column = piece.output_begin + column_lane;
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
            const int64_t part_index = call.part_index(piece, row);
            call.sums[part_index * call.value_size + column] = total;
            if (column == 0) {
              call.states[2 * part_index] = weights[r][0];
              call.states[2 * part_index + 1] = row_sum;
            }
          }
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace pkg::cuda
