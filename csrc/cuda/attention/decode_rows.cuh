// The rows of the tensor cores' kernel of decode_attention: which keys they
// see, and what becomes of their scores.
#pragma once

#include <cstdint>

#include "cuda/attention/decode.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/panel.cuh"

namespace pkg::cuda {

constexpr int kDecodeWarps = 4;
// Of rows and of keys, so that what is beyond a window fits 32 bits too.
constexpr int64_t kMostDecodeLength = int64_t{1} << 28;

// The lane's two rows of 16. Lengths must be below kMostDecodeLength.
template <class Element>
class DecodeRows {
 public:
  static constexpr int kWarpKeys = kDecodeTile / kDecodeWarps;

  __device__ __forceinline__ DecodeRows(const DecodeAttention<Element>& call,
                                        const DecodePiece& piece)
      : call_(call),
        piece_(piece),
        rows_(call.rows_see_all ? 1 : static_cast<int>(call.rows)),
        length_(static_cast<int>(piece.length)),
        window_(call.window_left < 0 ? kFar : at_most<kFar>(call.window_left)) {
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(i);
      const bool is_there = row < call.shared_rows();
      own_key_[i] = is_there ? own_key(row) : -1;
      slope_[i] = is_there && call.slopes.data != nullptr
                      ? call.slope(piece.sequence, piece.head, row)
                      : 0.0f;
    }
  }

  // The first key that any row sees.
  __device__ __forceinline__ int least() const {
    return at_least_0(length_ - rows_ - window_);
  }

  // Whether some rows see a key of the 16 from `first` on and others do not.
  __device__ __forceinline__ bool divides(int first) const {
    const bool at_window = first < last_first() && first + kWarpKeys > least();
    const bool at_end = first + kWarpKeys > first_end() && first < length_;
    return rows_ > 1 && (at_window || at_end);
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    return key <= own_key(row) && key >= own_key(row) - window_;
  }

  // The key that is a row's own: the last that it sees.
  __device__ __forceinline__ int own_key(int row) const {
    return length_ - rows_ + row % rows_;
  }

  // Which of the 16 keys from `first` on, of which `keys` are there, a row
  // sees whose own is `own_key`.
  __device__ __forceinline__ uint32_t seen(int own_key, int first,
                                           uint32_t keys) const {
    const int begin = at_least_0(own_key - window_ - first);
    const int end = own_key + 1 - first;
    const uint32_t before_end = end < 1 ? 0 : end > 15 ? ~0U : ~(~0U << end);
    const uint32_t from_begin = begin > 15 ? 0 : ~0U << begin;
    return keys & before_end & from_begin;
  }

  // Turns products into scores.
  template <class Scores>
  __device__ __forceinline__ void score(Scores& scores, int first,
                                        uint32_t keys) const {
    const typename Scores::Thread thread;
    const bool is_whole = keys == 0xffffU && first >= last_first() &&
                          first + kWarpKeys <= first_end();
    scores.scale(static_cast<float>(call_.scale));
    if (call_.softcap > 0.0f) {
      scores.transform([&](int, int, float scaled) {
        return call_.softcap * tanh(scaled / call_.softcap);
      });
    }
    PKG_UNROLL
    for (int i = 0; i < Scores::kThreadRows; ++i) {
      if (call_.slopes.data != nullptr) {
        PKG_UNROLL
        for (int j = 0; j < Scores::kThreadColumns; ++j) {
          const int key = first + thread.column(j) - thread.warp_column;
          scores.values[i][j] -=
              slope_[i] * static_cast<float>(own_key_[i] - key);
        }
      }
      if (call_.mask.type != MaskType::none) {
        mask_row(i, scores, first, keys);
      }
      if (!is_whole) {
        const uint32_t own = seen(own_key_[i], first, keys);
        PKG_UNROLL
        for (int j = 0; j < Scores::kThreadColumns; ++j) {
          const int key = thread.column(j) - thread.warp_column;
          if ((own >> key & 1) == 0) {
            scores.values[i][j] = -INFINITY;
          }
        }
      }
    }
  }

 private:
  static constexpr int kFar = 2 * kMostDecodeLength;

  __device__ __forceinline__ int row_of(int i) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return static_cast<int>(piece_.row_begin) + lane / 4 + 8 * i;
  }

  // Masks the scores of the lane's i-th row.
  template <class Scores>
  __device__ __forceinline__ void mask_row(int i, Scores& scores, int first,
                                           uint32_t keys) const {
    const typename Scores::Thread thread;
    const int row = row_of(i);
    if (row >= call_.shared_rows()) {
      return;
    }
    // In 32 bits, and anew for each turn: no registers are left to keep it in.
    const int heads_row = row / static_cast<int>(call_.rows);
    const auto& strides = call_.mask.strides;
    const int64_t offset =
        piece_.sequence * strides[0] +
        (piece_.head * call_.group + heads_row) * strides[1] +
        (row - heads_row * static_cast<int>(call_.rows)) * strides[2];
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      const int key = thread.column(j) - thread.warp_column;
      if ((keys >> key & 1) != 0) {
        scores.values[i][j] = call_.masked(scores.values[i][j],
                                           offset + (first + key) * strides[3]);
      }
    }
  }

  __device__ __forceinline__ static int at_least_0(int value) {
    return value < 0 ? 0 : value;
  }
  // The first key that the last row sees, and behind the last of the first row.
  __device__ __forceinline__ int last_first() const {
    return at_least_0(length_ - 1 - window_);
  }
  __device__ __forceinline__ int first_end() const {
    return length_ - rows_ + 1;
  }

  const DecodeAttention<Element>& call_;
  const DecodePiece& piece_;
  int rows_;  // that do not see the same keys
  int length_;
  int window_;
  int own_key_[2];
  float slope_[2];
};

}  // namespace pkg::cuda
