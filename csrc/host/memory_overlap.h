// Whether strided tensors share memory, decided exactly.
//
// Two index tuples reach one element where the sums of index times stride are
// equal: where s1 x1 + ... + sn xn = t has a solution in whole numbers of given
// ranges. Such a knapsack is hard in general and easy for the strides of
// tensors: a dimension whose stride is beyond the reach of all smaller ones is
// settled at once, and so are dimensions whose greatest common divisor does not
// divide what is left of t. Only interleaved dimensions are searched, and these
// for a number of steps that takes about a millisecond at most.
//
// PyTorch takes what it finds too hard to decide, which is most of that, for
// free of overlap.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <span>

#include "host/integer_math.h"
#include "host/tensor.h"

namespace pkg {

enum class Overlap { kNo, kYes, kUnknown };

namespace detail {

inline constexpr int64_t kOverlapSteps = int64_t{1} << 17;

// An index from 0 to `last`, times a stride.
struct StridedDim {
  int64_t stride;
  int64_t last;
};

class StridedDims {
 public:
  // The dimensions in which there are steps.
  void add(std::span<const int64_t> sizes, std::span<const int64_t> strides,
           int64_t unit) {
    for (size_t d = 0; d < sizes.size(); ++d) {
      add({strides[d] * unit, sizes[d] - 1});
    }
  }

  void add(StridedDim dim) {
    if (dim.last > 0) {
      dims_[count_++] = dim;
    }
  }

  void sort() {
    std::sort(begin(), end(),
              [](const auto& a, const auto& b) { return a.stride < b.stride; });
  }

  StridedDim* begin() { return dims_.data(); }
  StridedDim* end() { return dims_.data() + count_; }

  int64_t extent() {
    return std::accumulate(begin(), end(), int64_t{0},
                           [](int64_t sum, const StridedDim& dim) {
                             return sum + dim.stride * dim.last;
                           });
  }

 private:
  std::array<StridedDim, 2 * kMaxDims + 2> dims_;
  size_t count_ = 0;
};

// The sums that indices into some dimensions make, one index for each.
class ReachableSums {
 public:
  ReachableSums() { below_[0] = {0, 0}; }

  // To be called in the order of the strides, which are positive.
  void add(StridedDim dim) {
    if (count_ > 0) {
      // Where the last dimension reaches the next step of this one, all steps
      // of both are those of one dimension.
      StridedDim& before = dims_[count_ - 1];
      const int64_t ratio = dim.stride / before.stride;
      if (dim.stride % before.stride == 0 && ratio <= before.last + 1) {
        before.last += ratio * dim.last;
        below_[count_].sum += dim.stride * dim.last;
        return;
      }
    }
    const Below below = below_[count_];
    dims_[count_++] = dim;
    below_[count_] = {below.sum + dim.stride * dim.last,
                      std::gcd(below.divisor, dim.stride)};
  }

  // All calls together take a bounded number of steps, then say kUnknown.
  Overlap reach(int64_t target) {
    --steps_left_;
    return search(count_, target) ? Overlap::kYes
           : steps_left_ > 0      ? Overlap::kNo
                                  : Overlap::kUnknown;
  }

 private:
  // Sums are multiples of a divisor, from 0 to the sum of all last indices.
  struct Below {
    int64_t sum;
    int64_t divisor;
  };

  bool search(size_t dims, int64_t target) {
    const Below all = below_[dims];
    if (target < 0 || target > all.sum) {
      return false;
    }
    if (dims == 0) {
      return true;
    }
    if (target % all.divisor != 0) {
      return false;
    }
    if (dims == 1) {
      return true;
    }
    const auto [stride, last_index] = dims_[dims - 1];
    const Below below = below_[dims - 1];
    const int64_t last = std::min(last_index, target / stride);
    const int64_t beyond = std::max<int64_t>(target - below.sum, 0);
    int64_t index = ceil_div(beyond, stride);
    // What is left for the smaller strides is a multiple of their divisor once
    // every so many steps.
    while (index <= last && (target - index * stride) % below.divisor != 0) {
      if (--steps_left_ <= 0) {
        return false;
      }
      ++index;
    }
    const int64_t period = below.divisor / all.divisor;
    for (; index <= last; index += period) {
      if (--steps_left_ <= 0) {
        return false;
      }
      if (search(dims - 1, target - index * stride)) {
        return true;
      }
    }
    return false;
  }

  std::array<StridedDim, 2 * kMaxDims + 2> dims_;
  std::array<Below, 2 * kMaxDims + 3> below_;
  size_t count_ = 0;
  int64_t steps_left_ = kOverlapSteps;
};

}  // namespace detail

// Whether two index tuples of a tensor reach one element.
inline Overlap overlap_in_itself(const TensorView& tensor) {
  if (product(tensor.sizes) == 0) {
    return Overlap::kNo;
  }
  detail::StridedDims dims;
  dims.add(tensor.sizes, tensor.strides, 1);
  dims.sort();
  // Two tuples differ by -last to last in each dimension; counted from 0 that
  // is 0 to 2 last, and no difference is the sum of the lasts, `reach`. The
  // largest stride in which they differ is cancelled by the smaller ones.
  detail::ReachableSums differences;
  int64_t reach = 0;
  for (const auto& [stride, last] : dims) {
    if (stride == 0) {
      return Overlap::kYes;
    }
    for (int64_t x = 1; x <= std::min(last, reach / stride); ++x) {
      const Overlap overlap = differences.reach(reach - x * stride);
      if (overlap != Overlap::kNo) {
        return overlap;
      }
    }
    differences.add({stride, 2 * last});
    reach += stride * last;
  }
  return Overlap::kNo;
}

// Whether two tensors share a byte of memory.
inline Overlap overlap_between(const TensorView& a, const TensorView& b) {
  if (product(a.sizes) == 0 || product(b.sizes) == 0) {
    return Overlap::kNo;
  }
  const int64_t a_element_size = element_size(a.dtype);
  const int64_t b_element_size = element_size(b.dtype);
  const int64_t distance = static_cast<const char*>(b.const_data_ptr()) -
                           static_cast<const char*>(a.const_data_ptr());
  detail::StridedDims a_dims;
  detail::StridedDims b_dims;
  // Counted in elements where it can be, else in bytes.
  const bool aligned =
      a_element_size == b_element_size && distance % a_element_size == 0;
  const int64_t unit = aligned ? a_element_size : 1;
  a_dims.add(a.sizes, a.strides, a_element_size / unit);
  b_dims.add(b.sizes, b.strides, b_element_size / unit);
  a_dims.add({1, a_element_size / unit - 1});
  b_dims.add({1, b_element_size / unit - 1});
  // With b's indices counted from the end, both sides are one sum.
  const int64_t target = distance / unit + b_dims.extent();
  for (const auto& dim : b_dims) {
    a_dims.add(dim);
  }
  if (target < 0 || target > a_dims.extent()) {
    return Overlap::kNo;
  }
  a_dims.sort();
  detail::ReachableSums sums;
  for (const auto& dim : a_dims) {
    if (dim.stride > 0) {
      sums.add(dim);
    }
  }
  return sums.reach(target);
}

// True where the tensors are the same elements in the same order, which may be
// overwritten as they are read.
inline bool are_same_elements(const TensorView& a, const TensorView& b) {
  const auto sizes = sizes_of(a);
  const auto a_strides = strides_of(a);
  const auto b_strides = strides_of(b);
  bool same = a.const_data_ptr() == b.const_data_ptr() &&
              dtype_of(a) == dtype_of(b) &&
              std::ranges::equal(sizes, sizes_of(b));
  for (size_t d = 0; same && d < sizes.size(); ++d) {
    same = sizes[d] == 1 || a_strides[d] == b_strides[d];
  }
  return same;
}

}  // namespace pkg
