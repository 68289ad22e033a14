// What becomes of the integer sums of rowwise_scaled_linear: they are scaled by
// row and column, the bias is added, and the result is rounded once, in a pass
// over a block of sums in the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cpu/int4/arithmetic.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "rowwise_scaled_linear.h"

namespace pkg::cpu {

// Columns to which a row of sums is filled up, whole vectors in every type.
inline constexpr int64_t kSumPadding = 16;

// A block of `rows` x `columns` sums, of the result from (row, column) on.
struct SumBlock {
  const int32_t* sums;
  int64_t stride;
  const int32_t* row_totals;  // of the values of each row; null: no offset
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;
};

// Scales and bias are in the type that is computed in, contiguous, and those of
// the columns filled up by kSumPadding elements.
struct ScaledOutput {
  const void* row_scales;
  const void* column_scales;
  const void* bias;  // null without one
  void* output;
  int64_t output_stride;
  void (*store)(const ScaledOutput& to, const SumBlock& block);
};

namespace detail {

template <class Number, class Output>
void store_scaled(const ScaledOutput& to, const SumBlock& block) {
  constexpr int kLanes = simd::kLanes<Number>;
  static_assert(kSumPadding % kLanes == 0);
  using Integers =
      typename simd::VectorOf<int32_t,
                              kLanes* static_cast<int>(sizeof(int32_t))>::type;
  const auto* row_scales = static_cast<const Number*>(to.row_scales);
  const auto* column_scales =
      static_cast<const Number*>(to.column_scales) + block.column;
  const auto* bias = static_cast<const Number*>(to.bias);
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.row + r;
    const auto excess =
        block.row_totals == nullptr
            ? 0
            : static_cast<int32_t>(Int4Quads::kOffset *
                                   static_cast<uint32_t>(block.row_totals[r]));
    const Number scale = row_scales[row];
    Output* output =
        static_cast<Output*>(to.output) + row * to.output_stride + block.column;
    for (int64_t c = 0; c < block.columns; c += kLanes) {
      Integers sums;
      std::memcpy(&sums, block.sums + r * block.stride + c, sizeof(sums));
      simd::Vector<Number> value =
          __builtin_convertvector(sums - excess, simd::Vector<Number>);
      value = value * scale * simd::load(column_scales + c);
      if (bias != nullptr) {
        value += simd::load(bias + block.column + c);
      }
      const int count =
          static_cast<int>(std::min<int64_t>(kLanes, block.columns - c));
      if constexpr (!std::is_same_v<simd::Compute<Output>, Number>) {
        for (int i = 0; i < count; ++i) {
          output[c + i] = convert<Output>(value[i]);
        }
      } else if (count == kLanes) {
        simd::store(output + c, value);
      } else {
        simd::store_partial(output + c, value, count);
      }
    }
  }
}

// `count` values of any floating type, `stride` apart, as Number.
template <class Number>
void copy_as(const TensorView& from, int64_t stride, int64_t count,
             Number* to) {
  with_floating_type(from.dtype, [&](auto example) {
    using T = decltype(example);
    const T* values = static_cast<const T*>(from.const_data_ptr());
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = convert<Number>(values[i]);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = convert<Number>(values[i * stride]);
      }
    }
  });
}

template <class Number>
ScaledOutput prepare_scaled_output(const RowwiseScaledLinearPlan& plan,
                                   const TensorView& input_scale,
                                   const TensorView& weight_scale,
                                   const std::optional<TensorView>& bias,
                                   const Tensor& output) {
  const int64_t columns = plan.columns + kSumPadding;
  Number* row_scales =
      Workspace::of_this_thread<Slot::Bias>().template request<Number>(
          plan.rows + 2 * columns);
  with_floating_type(input_scale.dtype, [&](auto example) {
    using T = decltype(example);
    const T* from = static_cast<const T*>(input_scale.const_data_ptr());
    for (int64_t row = 0; row < plan.rows; ++row) {
      row_scales[row] = convert<Number>(
          from[row_offset(input_scale, plan.leading_dims, row)]);
    }
  });
  const auto prepare_columns = [&](const TensorView& from, int64_t stride,
                                   Number* to) {
    copy_as(from, stride, plan.columns, to);
    std::fill_n(to + plan.columns, kSumPadding, Number{});
    return to;
  };
  ScaledOutput result = {};
  result.row_scales = row_scales;
  result.column_scales = prepare_columns(
      weight_scale, weight_scale_stride(weight_scale), row_scales + plan.rows);
  result.bias = bias ? prepare_columns(*bias, bias->strides[0],
                                       row_scales + plan.rows + columns)
                     : nullptr;
  result.output = output.mutable_data_ptr();
  result.output_stride = plan.columns;
  with_floating_type(plan.output_type, [&](auto example) {
    using Output = decltype(example);
    if constexpr (sizeof(Output) <= sizeof(Number)) {
      result.store = &store_scaled<Number, Output>;
    }
  });
  return result;
}

}  // namespace detail

// What it refers to is valid until the next call in this thread.
inline ScaledOutput prepare_scaled_output(const RowwiseScaledLinearPlan& plan,
                                          const TensorView& input_scale,
                                          const TensorView& weight_scale,
                                          const std::optional<TensorView>& bias,
                                          const Tensor& output) {
  return plan.in_double ? detail::prepare_scaled_output<double>(
                              plan, input_scale, weight_scale, bias, output)
                        : detail::prepare_scaled_output<float>(
                              plan, input_scale, weight_scale, bias, output);
}

}  // namespace pkg::cpu
