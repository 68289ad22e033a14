// Checks of add_out, for every device.
#pragma once

#include <algorithm>

#include "pointwise.h"

namespace pkg {

namespace detail {

// True where two index tuples may reach one element: a dimension of stride 0,
// or a stride that a smaller dimension's extent reaches. Dense and sliced
// layouts are told apart exactly; an exotic layout without overlap (as_strided
// with interleaved dimensions) counts as overlapping.
inline bool may_overlap_itself(const Tensor& tensor) {
  const auto sizes = sizes_of(tensor);
  const auto strides = strides_of(tensor);
  std::array<std::pair<int64_t, int64_t>, kMaxDims> dims;
  size_t count = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) {
      return false;
    }
    if (sizes[d] > 1) {
      dims[count++] = {strides[d], sizes[d]};
    }
  }
  std::sort(dims.begin(), dims.begin() + count);
  int64_t extent = 0;
  for (size_t d = 0; d < count; ++d) {
    if (dims[d].first <= extent) {
      return true;
    }
    extent += dims[d].first * (dims[d].second - 1);
  }
  return false;
}

struct ByteRange {
  const char* begin;
  const char* end;
};

inline ByteRange bytes_of(const Tensor& tensor) {
  const auto sizes = sizes_of(tensor);
  const auto strides = strides_of(tensor);
  int64_t elements = product(sizes) > 0 ? 1 : 0;
  for (size_t d = 0; elements > 0 && d < sizes.size(); ++d) {
    elements += (sizes[d] - 1) * strides[d];
  }
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin,
          begin + elements * static_cast<int64_t>(tensor.element_size())};
}

// An input that is the output element for element may be overwritten as it is
// read; one that merely shares memory with it may not.
inline bool overlaps_partially(const Tensor& input, const Tensor& output) {
  const ByteRange in = bytes_of(input);
  const ByteRange out = bytes_of(output);
  if (in.begin >= out.end || out.begin >= in.end) {
    return false;
  }
  return !(in.begin == out.begin && dtype_of(input) == dtype_of(output) &&
           std::ranges::equal(sizes_of(input), sizes_of(output)) &&
           std::ranges::equal(strides_of(input), strides_of(output)));
}

}  // namespace detail

inline void check_add_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  check_binary("add_out", a, b);
  check_pointwise_dtype("add_out", "out", out);
  check_same_device("add_out", "a", a, "out", out);
  const Shape shape = broadcast_shapes("add_out", sizes_of(a), sizes_of(b));
  PKG_CHECK(std::ranges::equal(shape.span(), sizes_of(out)),
            "add_out: out has shape ", shape_text(out),
            " but a and b broadcast to ", shape_text(shape.span()),
            "; allocate out with that shape");
  const ScalarType from = result_type(a, b);
  const ScalarType to = dtype_of(out);
  const bool castable = is_floating(from)          ? is_floating(to)
                        : from == ScalarType::Bool ? true
                                                   : to != ScalarType::Bool;
  PKG_CHECK(castable, "add_out: the sum is ", dtype_name(from),
            ", which cannot be cast to out's dtype ", dtype_name(to));
  PKG_CHECK(!detail::may_overlap_itself(out),
            "add_out: several elements of out share one memory location (is it "
            "an expanded tensor?); pass out.clone() instead");
  for (const auto& [name, input] : {std::pair{"a", &a}, std::pair{"b", &b}}) {
    PKG_CHECK(!detail::overlaps_partially(*input, out), "add_out: ", name,
              " and out share memory without being the same elements; pass ",
              name, ".clone() instead");
  }
}

}  // namespace pkg
