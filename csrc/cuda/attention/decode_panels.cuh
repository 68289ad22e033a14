// Attention of a few queries against a cache of keys and values by
// multiply-adds: of float64 and float32, and of heads that the tensor cores'
// kernel has no room for.
//
// Algorithm: decode.cuh's. A block takes up to 8 (float64: 4) of the rows that
// share a key head and one part of the keys, 64 at a time: scores, eight
// neighbouring lanes to a key, of which each loads 16 bytes at a time, where
// keys lie so; the online softmax, a warp to a row; weighted sums of the
// values, of which a thread loads 16 bytes of one (8 in half precision) and has
// four on the way.
//
// Tiles: 64 keys; 1, 4 or 8 rows, 64 or 128 columns of the output: blocks of a
// wider output repeat the scores. In float32 a block of 8 rows takes 37 KiB of
// shared memory, 32 of them to add up what its threads have of the output.
//
// Where the log-sum-exp is wanted, a row's maximum becomes its largest score
// anew, added up in the order of the tiles' products
// (cuda/gemm/tile_product.cuh), which are what the backward pass takes it off:
// the weight of a key that has all of it is then 1, and not off by the
// difference of two roundings. That is the head once more for one key of each
// row and part.
//
// 2 (head_size + value_size) operations for a row and key, and as many elements
// to read for each key head.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"

namespace pkg::cuda {

constexpr int kDecodeThreads = 256;
constexpr int kDecodeBlocks = 4;  // to be had for each multiprocessor
constexpr int kDecodeLanes = 8;   // threads of a key
constexpr int kDecodeSlice = 64;  // elements of the head held at a time
// Rows of a block where one is not enough, and columns of a thread: 16 bytes of
// a value, or as many as leave its parts few. Of float64 registers hold the
// sums of no more rows.
template <class Element>
constexpr int kDecodeRows = sizeof(Element) == 8 ? 4 : 8;
template <class Element>
constexpr int kDecodeColumns = sizeof(Element) == 8 ? 2 : 4;

// Neighbours in a row of a cache that begins at the offset, which is negative
// where there is no row; zeros behind its end.
template <int kCount, class Element>
__device__ __forceinline__ Packet<Element, kCount> row_packet(
    const DecodeTensor<const Element>& tensor, int64_t size, bool has_vectors,
    int64_t offset, int64_t element) {
  Packet<Element, kCount> packet = {};
  const int64_t left = size - element;
  const Element* from = tensor.data + offset + element * tensor.strides[3];
  if (offset >= 0 && has_vectors && left >= kCount) {
    return *reinterpret_cast<const Packet<Element, kCount>*>(from);
  }
  PKG_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (offset >= 0 && i < left) {
      packet.values[i] = from[i * tensor.strides[3]];
    }
  }
  return packet;
}

// Where the i-th column of a lane lies in a part: those of all lanes, and
// neighbouring columns, are in different banks.
template <int kLanes>
__device__ __forceinline__ constexpr int part_place(int i, int lane) {
  return i * kLanes + (lane ^ 8 * (i * kLanes / kWarp));
}

// A block's part of the keys of one key head, for one tile of rows and columns.
template <class Element, int kRows, int kWidth>
class DecodePanels {
 public:
  using Number = Accumulator<Element>;
  // Neighbouring columns of a thread, and the threads of a value.
  static constexpr int kColumns = kDecodeColumns<Element>;
  static constexpr int kColumnLanes = kWidth / kColumns;
  static constexpr int kParts = kDecodeThreads / kColumnLanes;

  __device__ __forceinline__ DecodePanels(const DecodeAttention<Element>& call,
                                          int64_t index)
      : call_(call),
        piece_(call.template piece<kRows, kWidth>(index)),
        maximum_(-Number(INFINITY)),
        sum_(0),
        largest_(-1) {
    PKG_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PKG_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        sums_[r][i] = 0;
      }
    }
  }

  // How many keys each row sees.
  template <class Seen>
  __device__ __forceinline__ void count_seen(Seen&& seen) const {
    if (thread() < kRows) {
      const int64_t row = piece_.row_begin + thread();
      seen[thread()] = row < call_.shared_rows()
                           ? call_.seen(piece_.length, row)
                           : int64_t{0};
    }
  }

  __device__ __forceinline__ int64_t key_begin() const {
    return piece_.key_begin;
  }
  __device__ __forceinline__ int64_t key_end() const { return piece_.key_end; }

  // Where the rows of a tile of keys lie in the caches, -1 where there is none.
  template <class Offsets>
  __device__ __forceinline__ void find_rows(int64_t begin,
                                            Offsets&& key_offsets,
                                            Offsets&& value_offsets) const {
    if (thread() >= kDecodeTile) {
      return;
    }
    const int64_t key = begin + thread();
    int64_t outer = 0;
    int64_t inner = 0;
    const bool exists =
        key < piece_.key_end && call_.find(piece_.sequence, key, outer, inner);
    key_offsets[thread()] =
        exists ? call_.key.row(outer, piece_.head, inner) : -1;
    value_offsets[thread()] =
        exists ? call_.value.row(outer, piece_.head, inner) : -1;
  }

  // Scores of a tile of keys, which wait for the offsets. `is_first` of the
  // piece: a head of one slice stays for all tiles.
  template <class Query, class Offsets, class Seen, class Weights>
  __device__ __forceinline__ void score(int64_t begin, bool is_first,
                                        Query&& query, Offsets&& key_offsets,
                                        Seen&& seen, Weights&& weights) const {
    Number products[kThreadKeys][kRows] = {};
    const bool is_sliced = call_.head_size > kDecodeSlice;
    for (int64_t slice = 0; slice < call_.head_size; slice += kDecodeSlice) {
      if (is_first || is_sliced) {
        load_query(slice, query);
      }
      __syncthreads();
      add_products(slice, query, key_offsets, products);
      if (is_sliced) {
        __syncthreads();
      }
    }
    if (call_.head_size == 0) {
      __syncthreads();
    }
    PKG_UNROLL
    for (int k = 0; k < kThreadKeys; ++k) {
      const int key = k * kKeysAtOnce + thread() / kDecodeLanes;
      PKG_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Number product = lanes_sum<kDecodeLanes>(products[k][r]);
        if (thread() % kDecodeLanes == 0) {
          const int64_t count = seen[r];
          weights[r][key] = key_offsets[key] >= 0 && sees(count, begin + key)
                                ? score_of(r, begin + key, count, product)
                                : -Number(INFINITY);
        }
      }
    }
  }

  // The weights of the scores, a warp to a row, and what the sums before have
  // to be multiplied by. The maximum ignores NaN, the sum does not.
  template <class Weights, class Corrections>
  __device__ __forceinline__ void weigh(int64_t begin, Weights&& weights,
                                        Corrections&& corrections) {
    if (warp() >= kRows) {
      return;
    }
    const Number low = weights[warp()][lane()];
    const Number high = weights[warp()][lane() + kWarp];
    const Number previous = maximum_;
    maximum_ = fmax(previous, lanes_maximum<kWarp>(fmax(low, high)));
    if (call_.log_sum_exp != nullptr && maximum_ > previous) {
      const int place = low == maximum_    ? lane()
                        : high == maximum_ ? lane() + kWarp
                                           : -1;
      largest_ = begin + static_cast<int>(
                             lanes_maximum<kWarp>(static_cast<Number>(place)));
    }
    const Number origin = maximum_ == -Number(INFINITY) ? Number(0) : maximum_;
    const Number correction = exp(previous - origin);
    const Number low_weight = exp(low - origin);
    const Number high_weight = exp(high - origin);
    sum_ = sum_ * correction + lanes_sum<kWarp>(low_weight + high_weight);
    weights[warp()][lane()] = low_weight;
    weights[warp()][lane() + kWarp] = high_weight;
    if (lane() == 0) {
      corrections[warp()] = correction;
    }
  }

  template <class Weights, class Corrections, class Offsets, class Seen>
  __device__ __forceinline__ void add_values(int64_t begin, Weights&& weights,
                                             Corrections&& corrections,
                                             Offsets&& value_offsets,
                                             Seen&& seen) {
    PKG_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PKG_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        sums_[r][i] *= static_cast<Number>(corrections[r]);
      }
    }
    const bool has_vectors = call_.value.has_vectors();
    const int64_t column = piece_.output_begin + column_lane() * kColumns;
    PKG_UNROLL_BY(1)
    for (int first = part(); first < kDecodeTile;
         first += kValuesAtOnce * kParts) {
      Packet<Element, kColumns> values[kValuesAtOnce];
      PKG_UNROLL
      for (int v = 0; v < kValuesAtOnce; ++v) {
        values[v] =
            row_packet<kColumns>(call_.value, call_.value_size, has_vectors,
                                 value_offsets[first + v * kParts], column);
      }
      PKG_UNROLL
      for (int v = 0; v < kValuesAtOnce; ++v) {
        const int key = first + v * kParts;
        PKG_UNROLL
        for (int r = 0; r < kRows; ++r) {
          // A value that the row does not see may be NaN.
          const bool is_seen = sees(seen[r], begin + key);
          const Number weight = weights[r][key];
          PKG_UNROLL
          for (int i = 0; i < kColumns; ++i) {
            sums_[r][i] += is_seen
                               ? convert<Number>(values[v].values[i]) * weight
                               : Number(0);
          }
        }
      }
    }
  }

  // The maximum as the backward pass has that score.
  template <class Seen>
  __device__ __forceinline__ void score_largest(Seen&& seen) {
    int64_t outer = 0;
    int64_t inner = 0;
    if (largest_ < 0 || !call_.find(piece_.sequence, largest_, outer, inner)) {
      return;
    }
    const Element* query =
        call_.query.data + call_.row_offset(call_.query.strides,
                                            piece_.sequence, piece_.head,
                                            piece_.row_begin + warp());
    const Element* key =
        call_.key.data + call_.key.row(outer, piece_.head, inner);
    Number product = 0;
    PKG_UNROLL_BY(8)
    for (int64_t i = 0; i < call_.head_size; ++i) {
      product += convert<Number>(query[i * call_.query.strides[3]]) *
                 convert<Number>(key[i * call_.key.strides[3]]);
    }
    maximum_ = score_of(warp(), largest_, seen[warp()], product);
  }

  // What store() needs of every thread.
  template <class Weights, class Parts>
  __device__ __forceinline__ void share(Weights&& weights,
                                        Parts&& parts) const {
    PKG_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PKG_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        parts[r][part()][part_place<kColumnLanes>(i, column_lane())] =
            sums_[r][i];
      }
    }
    if (warp() < kRows && lane() == 0) {
      weights[warp()][0] = maximum_;
      weights[warp()][1] = sum_;
    }
  }

  template <class Weights, class Parts>
  __device__ __forceinline__ void store(Weights&& weights,
                                        Parts&& parts) const {
    for (int i = thread(); i < kRows * kWidth; i += kDecodeThreads) {
      const int r = i / kWidth;
      const int place = i % kWidth;
      const int64_t row = piece_.row_begin + r;
      const int64_t column = piece_.output_begin + place;
      if (row >= call_.shared_rows() || column >= call_.value_size) {
        continue;
      }
      Number total = 0;
      PKG_UNROLL
      for (int p = 0; p < kParts; ++p) {
        total += parts[r][p][part_place<kColumnLanes>(place % kColumns,
                                                      place / kColumns)];
      }
      const Number row_sum = weights[r][1];
      if (call_.splits == 1) {
        call_.store_result(piece_.sequence, piece_.head, row, column, total,
                           row_sum);
        if (column == 0) {
          call_.store_log_sum_exp(piece_.sequence, piece_.head, row,
                                  weights[r][0], row_sum);
        }
        continue;
      }
      const int64_t part_index = call_.part_index(piece_, row);
      call_.sums[part_index * call_.value_size + column] = total;
      if (column == 0) {
        call_.states[2 * part_index] = weights[r][0];
        call_.states[2 * part_index + 1] = row_sum;
      }
    }
  }

 private:
  static constexpr int kKeysAtOnce = kDecodeThreads / kDecodeLanes;
  static constexpr int kThreadKeys = kDecodeTile / kKeysAtOnce;
  static constexpr int kThreadValues = kDecodeTile / kParts;
  static constexpr int kValuesAtOnce = 4;
  static constexpr int kVector = 16 / sizeof(Element);
  static_assert(kThreadValues % kValuesAtOnce == 0);
  static_assert(kRows * kWarp <= kDecodeThreads && kDecodeTile == 2 * kWarp);

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static int warp() { return thread() / kWarp; }
  __device__ __forceinline__ static int lane() { return thread() % kWarp; }
  __device__ __forceinline__ static int column_lane() {
    return thread() % kColumnLanes;
  }
  __device__ __forceinline__ static int part() {
    return thread() / kColumnLanes;
  }

  __device__ __forceinline__ bool sees(int64_t seen, int64_t key) const {
    return key < seen && call_.in_window(key, seen);
  }
  __device__ __forceinline__ Number score_of(int r, int64_t key, int64_t seen,
                                             Number product) const {
    return call_.modified(product * static_cast<Number>(call_.scale),
                          piece_.sequence, piece_.head, piece_.row_begin + r,
                          key, seen - 1 - key);
  }

  template <class Query>
  __device__ __forceinline__ void load_query(int64_t slice,
                                             Query&& query) const {
    for (int i = thread(); i < kRows * kDecodeSlice; i += kDecodeThreads) {
      const int64_t row = piece_.row_begin + i / kDecodeSlice;
      const int64_t element = slice + i % kDecodeSlice;
      const bool exists =
          row < call_.shared_rows() && element < call_.head_size;
      query[i / kDecodeSlice][i % kDecodeSlice] =
          exists ? convert<Number>(
                       call_.query.data[call_.row_offset(call_.query.strides,
                                                         piece_.sequence,
                                                         piece_.head, row) +
                                        element * call_.query.strides[3]])
                 : Number(0);
    }
  }

  template <class Query, class Offsets>
  __device__ __forceinline__ void add_products(
      int64_t slice, Query&& query, Offsets&& key_offsets,
      Number (&products)[kThreadKeys][kRows]) const {
    const bool has_vectors = call_.key.has_vectors();
    PKG_UNROLL
    for (int k = 0; k < kThreadKeys; ++k) {
      const int64_t offset =
          key_offsets[k * kKeysAtOnce + thread() / kDecodeLanes];
      PKG_UNROLL
      for (int e = 0; e < kDecodeSlice / kDecodeLanes; e += kVector) {
        const int place = e * kDecodeLanes + thread() % kDecodeLanes * kVector;
        const Packet<Element, kVector> elements = row_packet<kVector>(
            call_.key, call_.head_size, has_vectors, offset, slice + place);
        PKG_UNROLL
        for (int i = 0; i < kVector; ++i) {
          PKG_UNROLL
          for (int r = 0; r < kRows; ++r) {
            products[k][r] +=
                convert<Number>(elements.values[i]) * query[r][place + i];
          }
        }
      }
    }
  }

  const DecodeAttention<Element>& call_;
  DecodePiece piece_;
  Number maximum_;  // of the warp's row
  Number sum_;
  int64_t largest_;  // the key that has the maximum; -1 where it is not wanted
  Number sums_[kRows][kColumns];
};

template <class Element, int kRows, int kWidth>
__global__ void __launch_bounds__(kDecodeThreads, kRows == 1 ? 2 : 1)
    decode_attention_panels_kernel(
        const __grid_constant__ DecodeAttention<Element> call) {
  let_next_kernel_begin();
  using Panels = DecodePanels<Element, kRows, kWidth>;
  using Number = typename Panels::Number;
  PKG_SHARED(Number, query, [kRows][kDecodeSlice]);
  PKG_SHARED(Number, weights, [kRows][kDecodeTile]);
  PKG_SHARED(Number, corrections, [kRows]);
  PKG_SHARED(Number, parts, [kRows][Panels::kParts][kWidth]);
  PKG_SHARED(int64_t, key_offsets, [kDecodeTile]);
  PKG_SHARED(int64_t, value_offsets, [kDecodeTile]);
  PKG_SHARED(int64_t, seen, [kRows]);
  const int64_t pieces = call.template piece_count<kRows, kWidth>();
  for (int64_t index = blockIdx.x; index < pieces; index += gridDim.x) {
    Panels panels(call, index);
    panels.count_seen(seen);
    for (int64_t begin = panels.key_begin(); begin < panels.key_end();
         begin += kDecodeTile) {
      panels.find_rows(begin, key_offsets, value_offsets);
      panels.score(begin, begin == panels.key_begin(), query, key_offsets, seen,
                   weights);
      __syncthreads();
      panels.weigh(begin, weights, corrections);
      __syncthreads();
      panels.add_values(begin, weights, corrections, value_offsets, seen);
      __syncthreads();
    }
    panels.score_largest(seen);
    panels.share(weights, parts);
    __syncthreads();
    panels.store(weights, parts);
    __syncthreads();
  }
}

}  // namespace pkg::cuda
