// The same of calls whose scores are products and a scale, where a key is seen:
// scores.cuh without what takes registers and time.
#pragma once

#include <cstdint>

#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"

namespace pkg::cuda {

// The scores of a problem that is_plain(), whose limits take one register each.
// Lengths must be below kMostTiledLength.
template <class Element>
class PlainScores {
 public:
  __device__ __forceinline__
  PlainScores(const AttentionProblem<Element>& problem, int64_t,
              const AttentionExtent& extent)
      : scale_(static_cast<Accumulator<Element>>(problem.scale)),
        rows_(static_cast<int>(extent.rows)),
        columns_(static_cast<int>(extent.columns)),
        first_(near(extent.limits.first)),
        last_(near(extent.limits.last)) {}

  static constexpr bool kScalesExponents = false;  // see ScaledExponents

  template <class Scores>
  __device__ __forceinline__ void score_tile(Scores& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    tile.scale(scale_);
    hide_unseen(tile, row_begin, column_begin);
  }

  // Minus infinity in place of what takes no part.
  template <class Scores>
  __device__ __forceinline__ void hide_unseen(Scores& tile, int64_t row_begin,
                                              int64_t column_begin) const {
    const int row = static_cast<int>(row_begin);
    const int column = static_cast<int>(column_begin);
    TileLimits(rows_ - row, columns_ - column, first_ + row - column,
               last_ + row - column)
        .hide_unseen(tile);
  }

  template <class Weights>
  __device__ __forceinline__ void drop_tile(Weights&, int64_t, int64_t) const {}
  template <class Weights>
  __device__ __forceinline__ uint32_t kept_of_transposed(int64_t,
                                                         int64_t) const {
    return ~uint32_t{0};
  }
  __device__ __forceinline__ float keep_scale() const { return 1.0f; }
  __device__ __forceinline__ bool caps() const { return false; }
  __device__ __forceinline__ float cap_slope(float) const { return 1.0f; }

  __device__ __forceinline__ Accumulator<Element> scale() const {
    return scale_;
  }

 private:
  // What lies further than any key is as good as no limit.
  __device__ __forceinline__ static int near(int64_t distance) {
    return static_cast<int>(distance < -kMostTiledLength  ? -kMostTiledLength
                            : distance > kMostTiledLength ? kMostTiledLength
                                                          : distance);
  }

  Accumulator<Element> scale_;
  int rows_;
  int columns_;
  int first_;
  int last_;
};

// The same for kernels that leave products as they are: the multiply-add that
// takes a maximum, or a log-sum-exp, off an exponent scales too. Where the
// scale is positive, as is_plain() says, the largest score is that of the
// largest product.
template <class Element>
class ScaledExponents : public PlainScores<Element> {
 public:
  static constexpr bool kScalesExponents = true;
  using PlainScores<Element>::PlainScores;

  template <class Scores>
  __device__ __forceinline__ void score_tile(Scores& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    this->hide_unseen(tile, row_begin, column_begin);
  }

  // In units of log(2).
  __device__ __forceinline__ float scale_of_exponents() const {
    return this->scale() * FastExponential::kLog2OfE;
  }
};

}  // namespace pkg::cuda
