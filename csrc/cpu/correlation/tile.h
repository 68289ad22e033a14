// The two micro-kernels of spatial_correlation_sample, on packed rows: products
// of vectors of neighbouring pixels with vectors a shift away. Sums stay in
// registers.
//
// A multiply-add needs a shifted vector of its own, which no register holds
// already: 1 + 1/kShifts loads (1 + 1/kChannels in the gradient) for each, most
// of them across two cache lines, which take two cycles for 512 bits on a
// Zen 4. So the loads bound both kernels, at half of the arithmetic limit:
// measured 55 to 60 of 118 GFLOP/s in float32, alike for tiles of 8 x 1 and 8 x
// 2 vectors and for 256-bit vectors.
//
// Tried: passes over so few channels that both rows stay in the first-level
// cache, which took 1.3 times as long. Left out: a matrix product of all pixels
// of a row with all of the other, of which only the band counts, does 1.5
// (patch 21) to 2 times (patch 9) the work at nearly twice the rate, and leaves
// the band to be transposed.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu::spatial_correlation {

// Shifts, or channels, and vectors of a tile. With 32 registers 9 x 2 sums and
// the vectors that they share fit, and the offsets of 9 in general registers;
// with 16, 5 x 2.
inline constexpr int kTileMost = simd::kVectorRegisters >= 32 ? 9 : 5;
inline constexpr int kTileVectors = 2;

// Sums longer than this are made of parts, whose rounding errors add up to
// less.
inline constexpr int64_t kChain = 64;

// to[s][pixel] = sum over c of a[c][pixel] * b[c][pixel + s * shift_step]
template <class Number, int kShifts, int kVectors>
void correlate_tile(const Number* a, int64_t a_step, const Number* b,
                    int64_t b_step, int64_t shift_step, int64_t channels,
                    Number* to, int64_t to_step) {
  using Vector = simd::Vector<Number>;
  constexpr int kLanes = simd::kLanes<Number>;
  int64_t shifts[kShifts];
  for (int s = 0; s < kShifts; ++s) {
    shifts[s] = s * shift_step;
  }
  int64_t done = 0;
  do {
    const int64_t chain = channels - done < kChain ? channels - done : kChain;
    Vector sums[kShifts][kVectors] = {};
    for (int64_t c = 0; c < chain; ++c, a += a_step, b += b_step) {
      Vector left[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        left[v] = simd::load(a + v * kLanes);
      }
#pragma GCC unroll 16
      for (int s = 0; s < kShifts; ++s) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          sums[s][v] += left[v] * simd::load(b + shifts[s] + v * kLanes);
        }
      }
    }
    for (int s = 0; s < kShifts; ++s) {
      for (int v = 0; v < kVectors; ++v) {
        Number* place = to + s * to_step + v * kLanes;
        simd::store(place,
                    done > 0 ? simd::load(place) + sums[s][v] : sums[s][v]);
      }
    }
    done += chain;
  } while (done < channels);
}

// One row of the patch: its gradients, each a row of pixels, and the row of the
// other image that they meet, at the first of its shifts.
template <class Number>
struct PatchRow {
  const Number* grad;
  const Number* other;
};

// to[c][pixel] += sum over rows and s of
//   rows.grad[s][pixel] * rows.other[c][pixel + s * shift_step]
template <class Number, int kChannels, int kVectors>
void gather_tile(const PatchRow<Number>* rows, int64_t row_count,
                 int64_t grad_step, int64_t shifts, int64_t shift_step,
                 int64_t channel_step, int64_t offset, int64_t other_offset,
                 Number* to, int64_t to_step) {
  using Vector = simd::Vector<Number>;
  constexpr int kLanes = simd::kLanes<Number>;
  int64_t channel_offsets[kChannels];
  for (int c = 0; c < kChannels; ++c) {
    channel_offsets[c] = c * channel_step;
  }
  Vector sums[kChannels][kVectors] = {};
  for (int64_t r = 0; r < row_count; ++r) {
    const Number* grad = rows[r].grad + offset;
    const Number* other = rows[r].other + other_offset;
    for (int64_t s = 0; s < shifts; ++s) {
      Vector left[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        left[v] = simd::load(grad + v * kLanes);
      }
#pragma GCC unroll 16
      for (int c = 0; c < kChannels; ++c) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          sums[c][v] +=
              left[v] * simd::load(other + channel_offsets[c] + v * kLanes);
        }
      }
      grad += grad_step;
      other += shift_step;
    }
  }
  for (int c = 0; c < kChannels; ++c) {
    for (int v = 0; v < kVectors; ++v) {
      Number* place = to + c * to_step + v * kLanes;
      simd::store(place, simd::load(place) + sums[c][v]);
    }
  }
}

// Calls function.operator()<count>() for a count from 1 to kMost.
template <int kMost, class Function>
void with_count(int64_t count, const Function& function) {
  if constexpr (kMost == 1) {
    function.template operator()<1>();
  } else if (count >= kMost) {
    function.template operator()<kMost>();
  } else {
    with_count<kMost - 1>(count, function);
  }
}

// Cuts `count` shifts or channels and `columns` pixels (whole vectors) into
// tiles of nearly the same size, and calls
// function.operator()<kCount, kVectors>(first, column) for each.
template <class Number, class Function>
void for_each_tile(int64_t count, int64_t columns, const Function& function) {
  constexpr int64_t kLanes = simd::kLanes<Number>;
  const int64_t tiles = ceil_div(count, kTileMost);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = count * tile / tiles;
    const int64_t size = count * (tile + 1) / tiles - first;
    with_count<kTileMost>(size, [&]<int kCount>() {
      int64_t column = 0;
      for (; column + kTileVectors * kLanes <= columns;
           column += kTileVectors * kLanes) {
        function.template operator()<kCount, kTileVectors>(first, column);
      }
      if (column < columns) {
        function.template operator()<kCount, 1>(first, column);
      }
    });
  }
}

}  // namespace pkg::cpu::spatial_correlation
