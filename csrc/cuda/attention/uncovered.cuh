// The tokens of a packed batch that no sequence covers: those in front of the
// first offset and behind the last, and what of a sequence lies beyond the
// longest that the caller told of. No block of attention owns them, and where
// they are only the device knows, so a kernel of its own writes what they get:
// zeros, and minus infinity as log-sum-exp.
//
// A thread finds the sequence of its token by bisection of the offsets; a warp
// then writes the uncovered ones of its 32 tokens one after the other. Bytes:
// those of the uncovered rows alone are written, and log2(sequences) offsets a
// token are read, which all threads share.
//
// Launched before the kernels of attention: offsets that decrease, which the
// device cannot refuse, may call a token uncovered that a sequence computes.
#pragma once

#include <cstdint>

#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

constexpr int kUncoveredThreads = 256;

// Rows of a contiguous tensor, whose elements are of 2 bytes or more.
struct ZeroedRows {
  void* data;  // null where there is none; aligned to 16 bytes
  int64_t row_bytes;
};

// A side of attention, queries or keys, and what is kept for each of its
// tokens. Number is the type of the log-sum-exp.
template <class Number>
struct UncoveredTokens {
  SequenceOffsets offsets;
  int64_t sequences;
  int64_t tokens;
  int64_t most;  // tokens of a sequence that are computed
  ZeroedRows rows[2];
  Number* log_sum_exp;  // contiguous: heads, tokens; may be null
  int64_t heads;

  __host__ __device__ int64_t block_count() const {
    return ceil_div(tokens, kUncoveredThreads);
  }

  // Whatever the offsets are, what is covered lies in a sequence_range.
  __device__ __forceinline__ bool covers(int64_t token) const {
    int64_t before = -1;  // of the last offset that is not behind the token
    int64_t behind = sequences + 1;
    while (behind - before > 1) {
      const int64_t middle = before + (behind - before) / 2;
      if (offsets[middle] <= token) {
        before = middle;
      } else {
        behind = middle;
      }
    }
    return before >= 0 && before < sequences &&
           token < sequence_range(offsets, before, tokens, most).begin + most;
  }
};

template <class Word>
__device__ __forceinline__ void zero_row(const ZeroedRows& rows, int64_t row,
                                         int lane) {
  const int64_t words = rows.row_bytes / static_cast<int64_t>(sizeof(Word));
  Word* const begin = static_cast<Word*>(rows.data) + row * words;
  for (int64_t word = lane; word < words; word += kWarp) {
    begin[word] = Word{};
  }
}

template <class Number>
__global__ void __launch_bounds__(kUncoveredThreads) attention_uncovered_kernel(
    const __grid_constant__ UncoveredTokens<Number> call) {
  using Line = Packet<uint32_t, 4>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t block = blockIdx.x; block < call.block_count();
       block += gridDim.x) {
    const int64_t token = block * kUncoveredThreads + threadIdx.x;
    const bool is_uncovered = token < call.tokens && !call.covers(token);
    if (is_uncovered && call.log_sum_exp != nullptr) {
      for (int64_t head = 0; head < call.heads; ++head) {
        call.log_sum_exp[head * call.tokens + token] = -Number(INFINITY);
      }
    }
    const unsigned uncovered = __ballot_sync(0xffffffffu, is_uncovered);
    for (int other = 0; uncovered != 0 && other < kWarp; ++other) {
      if ((uncovered >> other & 1) == 0) {
        continue;
      }
      const int64_t row = token - lane + other;
      PKG_UNROLL
      for (const ZeroedRows& rows : call.rows) {
        if (rows.data != nullptr && rows.row_bytes % sizeof(Line) == 0) {
          zero_row<Line>(rows, row, lane);
        } else if (rows.data != nullptr) {
          zero_row<uint16_t>(rows, row, lane);
        }
      }
    }
  }
}

}  // namespace pkg::cuda
