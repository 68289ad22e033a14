// Attention of a few queries against a cache of keys and values: what its
// kernels share.
//
// The keys of a sequence are split among blocks (Dao and others,
// "Flash-Decoding", 2023), so that few sequences keep the device busy. The
// parts follow the length of each sequence, which only the device knows. A
// second kernel combines the parts in their order.
#pragma once

#include <cstdint>

#include "cuda/attention/problem.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

constexpr int kDecodeTile = 64;  // keys
constexpr int kCombineThreads = 256;

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

  // The same in two steps, so that there is something to do until it has come:
  // nothing is computed of it before value().
  struct Pending {
    int32_t low = 0;
    int32_t high = 0;
  };
  __device__ __forceinline__ Pending begin_at(int64_t i, int64_t j) const {
    const int64_t offset = i * strides[0] + j * strides[1];
    const auto* words = static_cast<const int32_t*>(data);
    return {words[is_wide ? 2 * offset : offset],
            is_wide ? words[2 * offset + 1] : 0};
  }
  __device__ __forceinline__ int64_t value(const Pending& pending) const {
    return is_wide ? static_cast<int64_t>(pending.high) << 32 |
                         static_cast<uint32_t>(pending.low)
                   : pending.low;
  }
};

// A tensor (sequences or pages, heads, keys or rows, elements).
template <class Element>
struct DecodeTensor {
  Element* data;
  int64_t strides[4];

  // The offset of a row.
  __device__ __forceinline__ int64_t row(int64_t outer, int64_t head,
                                         int64_t inner) const {
    return outer * strides[0] + head * strides[1] + inner * strides[2];
  }

  // Whether every row is of neighbours, from an address on that 16 bytes have.
  __device__ __forceinline__ bool has_vectors() const {
    constexpr int kVector = 16 / sizeof(Element);
    return strides[3] == 1 && strides[0] % kVector == 0 &&
           strides[1] % kVector == 0 && strides[2] % kVector == 0 &&
           is_aligned(data, kVector);
  }
};

// ALiBi's slopes, of each sequence and query head.
struct DecodeSlopes {
  const void* data;  // null without
  int64_t strides[2];
  bool is_single;  // float32, else of the queries' type
};

// A mask of attention: (sequences, query heads, rows, keys).
struct DecodeMask {
  const void* data;
  MaskType type;
  int64_t strides[4];
};

// What a block works at: a tile of the rows that share a key head, against one
// part of the keys, for a tile of the output's columns.
struct DecodePiece {
  int64_t sequence;
  int64_t head;
  int64_t split;
  int64_t row_begin;
  int64_t output_begin;
  int64_t length;  // of the sequence
  int64_t key_begin;
  int64_t key_end;
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
  DecodeIndices lengths;         // null: all sequences have `capacity` keys
  DecodeIndices table;
  // Of several splits: maximum and sum, and weighted sums of the values, of
  // each sequence, key head, split and row.
  Accumulator<Element>* states;
  Accumulator<Element>* sums;
  int64_t window_left = -1;  // keys before its own that a row sees; -1: all
  Number softcap = 0;        // 0 where scores are not capped
  DecodeSlopes slopes = {};
  // Whether each row of a head sees the last key, else the last row alone does,
  // the one before it one key less, and so on.
  bool rows_see_all = false;
  DecodeMask mask = {};
  // Of the scores: sequences, query heads, rows, contiguous. May be null.
  Number* log_sum_exp = nullptr;
  // What rounding takes off the output, laid out as that. May be null.
  Element* residual = nullptr;

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
    if (lengths.data == nullptr) {
      return capacity;
    }
    const int64_t given = lengths.at(sequence);
    return given < 0 ? 0 : given > capacity ? capacity : given;
  }

  // How many keys a row sees; negative for none.
  __device__ __forceinline__ int64_t seen(int64_t length, int64_t row) const {
    return rows_see_all ? length : length - rows + row % rows + 1;
  }

  // Whether the window lets a row that sees so many keys see this one of them.
  // Its left side may be any number: distances are compared with it, for which
  // none overflows.
  __device__ __forceinline__ bool in_window(int64_t key, int64_t seen) const {
    return window_left < 0 || seen - 1 - key <= window_left;
  }

  // The first tile of keys that any row sees.
  __device__ __forceinline__ int64_t first_key(int64_t length) const {
    const int64_t own = seen(length, 0) - 1;
    return window_left < 0 || own <= window_left
               ? 0
               : (own - window_left) / kDecodeTile * kDecodeTile;
  }

  // A scaled product as the score of a key for a row whose own key is so far
  // from it.
  __device__ __forceinline__ Number modified(Number score, int64_t sequence,
                                             int64_t head, int64_t row,
                                             int64_t key,
                                             int64_t distance) const {
    if (softcap > Number(0)) {
      score = softcap * tanh(score / softcap);
    }
    if (slopes.data != nullptr) {
      score -= slope(sequence, head, row) * static_cast<Number>(distance);
    }
    return mask.type == MaskType::none
               ? score
               : masked(score, mask_offset(sequence, head, row) +
                                   key * mask.strides[3]);
  }

  // Of a row's first key in the mask.
  __device__ __forceinline__ int64_t mask_offset(int64_t sequence, int64_t head,
                                                 int64_t row) const {
    return row_offset(mask.strides, sequence, head, row);
  }

  // What the mask's element there makes of a score. There is a mask.
  __device__ __forceinline__ Number masked(Number score, int64_t offset) const {
    if (mask.type == MaskType::boolean) {
      return static_cast<const uint8_t*>(mask.data)[offset] != 0
                 ? score
                 : -Number(INFINITY);
    }
    return score +
           (mask.type == MaskType::single
                ? convert<Number>(static_cast<const float*>(mask.data)[offset])
                : convert<Number>(
                      static_cast<const Element*>(mask.data)[offset]));
  }

  __device__ __forceinline__ Number slope(int64_t sequence, int64_t head,
                                          int64_t row) const {
    const int64_t at = sequence * slopes.strides[0] +
                       (head * group + row / rows) * slopes.strides[1];
    return slopes.is_single
               ? convert<Number>(static_cast<const float*>(slopes.data)[at])
               : convert<Number>(static_cast<const Element*>(slopes.data)[at]);
  }

  // Pieces are counted with the tiles of one part's keys together: blocks that
  // run side by side read the same keys.
  template <int kRows, int kWidth>
  __device__ __forceinline__ DecodePiece piece(int64_t index) const {
    DecodePiece piece;
    const int64_t row_tiles = tiles_of(shared_rows(), kRows);
    piece.output_begin = index % output_tiles<kWidth>() * kWidth;
    index /= output_tiles<kWidth>();
    piece.row_begin = index % row_tiles * kRows;
    index /= row_tiles;
    piece.split = index % splits;
    index /= splits;
    piece.head = index % key_heads;
    piece.sequence = index / key_heads;

    piece.length = length(piece.sequence);
    const int64_t first = first_key(piece.length);
    const int64_t keys = tiles_of(tiles_of(piece.length - first, kDecodeTile),
                                  static_cast<int>(splits)) *
                         kDecodeTile;
    piece.key_begin = first + piece.split * keys;
    const int64_t end = piece.key_begin + keys;
    piece.key_end = piece.length < end ? piece.length : end;
    return piece;
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

  // Of what several splits leave for the combination.
  __device__ __forceinline__ int64_t part_index(const DecodePiece& piece,
                                                int64_t row) const {
    return ((piece.sequence * key_heads + piece.head) * splits + piece.split) *
               shared_rows() +
           row;
  }

  // Of a row's weighted values and its weights, whose sum is 0 where it has
  // none.
  __device__ __forceinline__ void store_result(int64_t sequence, int64_t head,
                                               int64_t row, int64_t column,
                                               Number total, Number sum) const {
    const int64_t offset = row_offset(output.strides, sequence, head, row) +
                           column * output.strides[3];
    const Number result = sum == Number(0) ? Number(0) : total / sum;
    output.data[offset] = convert<Element>(result);
    if (residual != nullptr) {
      residual[offset] = convert<Element>(rounded_off<Element>(result));
    }
  }

  __device__ __forceinline__ void store_log_sum_exp(int64_t sequence,
                                                    int64_t head, int64_t row,
                                                    Number maximum,
                                                    Number sum) const {
    if (log_sum_exp != nullptr) {
      log_sum_exp[(sequence * key_heads + head) * shared_rows() + row] =
          maximum + log(sum);
    }
  }
};

// A thread to each element of the output.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads) decode_attention_combine(
    const __grid_constant__ DecodeAttention<Element> call) {
  wait_for_kernel_before();
  using Number = Accumulator<Element>;
  // Parts whose numbers are loaded at once. (With two exponentials of float64
  // the compiler spilled, nvcc 13.0.)
  [[maybe_unused]] constexpr int kTogether =
      sizeof(Number) == sizeof(float) ? 8 : 1;
  const int64_t rows = call.shared_rows();
  const int64_t results = call.result_count();
  for (int64_t result = global_thread_index(); result < results;
       result += global_thread_count()) {
    const int64_t column = result % call.value_size;
    const int64_t row = result / call.value_size % rows;
    const int64_t head = result / call.value_size / rows;
    const int64_t first = head * call.splits * rows + row;
    Number maximum = -Number(INFINITY);
    PKG_UNROLL_BY(kTogether)
    for (int64_t split = 0; split < call.splits; ++split) {
      maximum = fmax(maximum, call.states[2 * (first + split * rows)]);
    }
    const Number origin = maximum == -Number(INFINITY) ? Number(0) : maximum;
    Number sum = 0;
    Number total = 0;
    PKG_UNROLL_BY(kTogether)
    for (int64_t split = 0; split < call.splits; ++split) {
      const int64_t index = first + split * rows;
      const Number factor = exp(call.states[2 * index] - origin);
      sum += call.states[2 * index + 1] * factor;
      total += call.sums[index * call.value_size + column] * factor;
    }
    const int64_t sequence = head / call.key_heads;
    const int64_t key_head = head % call.key_heads;
    call.store_result(sequence, key_head, row, column, total, sum);
    if (column == 0) {
      call.store_log_sum_exp(sequence, key_head, row, maximum, sum);
    }
  }
}

}  // namespace pkg::cuda
