// Checks of add_out, for every device.
#pragma once

#include <algorithm>

#include "host/memory_overlap.h"
#include "host/pointwise.h"

namespace pkg {

namespace detail {

inline void check_overlap_in_itself(const TensorView& out) {
  const Overlap overlap = overlap_in_itself(out);
  PKG_CHECK(overlap != Overlap::kYes,
            "add_out: several elements of out share one memory location (is it "
            "an expanded tensor?); pass out.clone() instead");
  PKG_CHECK(overlap != Overlap::kUnknown, "add_out: out has strides ",
            shape_text(strides_of(out)), ", which interleave its dimensions ",
            "so that it would take too long to find out whether elements ",
            "share memory; pass out.contiguous() and copy the result back");
}

inline void check_overlap_of_input(const char* name, const TensorView& input,
                                   const TensorView& out) {
  if (are_same_elements(input, out)) {
    return;
  }
  const Overlap overlap = overlap_between(input, out);
  PKG_CHECK(overlap != Overlap::kYes, "add_out: ", name,
            " and out share memory without being the same elements; pass ",
            name, ".clone() instead");
  PKG_CHECK(overlap != Overlap::kUnknown, "add_out: ", name, " of strides ",
            shape_text(strides_of(input)), " and out of strides ",
            shape_text(strides_of(out)),
            " lie in the same memory, interleaved so that it would take too "
            "long to find out whether they share elements; pass ",
            name, ".clone() instead");
}

}  // namespace detail

// The shape of the result.
inline Shape check_add_out(const TensorView& a, const TensorView& b,
                           const WritableView& out) {
  check_pointwise_dtype("add_out", "a", a);
  check_pointwise_dtype("add_out", "b", b);
  check_same_device("add_out", "a", a, "b", b);
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
  detail::check_overlap_in_itself(out);
  // A lazy clone gets the memory of its own that it will be written to: until
  // then it seems to overlap with its original.
  static_cast<void>(out.mutable_data_ptr());
  detail::check_overlap_of_input("a", a, out);
  detail::check_overlap_of_input("b", b, out);
  return shape;
}

}  // namespace pkg
