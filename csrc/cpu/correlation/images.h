// What the forward and the backward kernels of spatial_correlation_sample share
// beside rows and tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/correlation/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::spatial_correlation {

// Tasks that each thread should have, so that unequal ones even out.
inline constexpr int64_t kTasksOfThread = 4;

// One thread, where another would cost more than it brings.
inline int64_t threads_for(const SpatialCorrelationPlan& plan) {
  double work = static_cast<double>(plan.channels);
  for (const int64_t size : plan.output_sizes()) {
    work *= static_cast<double>(size);
  }
  return work < kMultiplyAddGrain ? 1 : num_threads();
}

// Shifts in width that leave something of the image, and how far they go.
struct Shifts {
  int64_t first;  // element of the patch
  int64_t count;
  int64_t offset;  // of the first, in pixels
  int64_t step;
  int64_t reach;

  explicit Shifts(const SpatialCorrelationPlan& plan) {
    const auto [begin, end] = plan.patch_range(1);
    first = begin;
    count = end - begin;
    offset = plan.shift(1, begin);
    step = plan.dilation_patch[1];
    reach = std::max<int64_t>({0, -offset, plan.shift(1, end - 1)});
  }
};

template <class Input>
void store_row(Input* to, const simd::Compute<Input>* from, int64_t count) {
  constexpr int kLanes = simd::kLanes<simd::Compute<Input>>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(to + i, simd::load(from + i));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    simd::store_partial(to + i, simd::load_partial(from + i, rest), rest);
  }
}

template <class Input>
void add_row(simd::Compute<Input>* to, const Input* from, int64_t count) {
  constexpr int kLanes = simd::kLanes<simd::Compute<Input>>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    simd::store(to + i, simd::load(to + i) + simd::load(from + i));
  }
  for (; i < count; ++i) {
    to[i] += static_cast<simd::Compute<Input>>(from[i]);
  }
}

}  // namespace pkg::cpu::spatial_correlation
