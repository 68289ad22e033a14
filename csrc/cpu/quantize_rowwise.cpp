// quantize_rowwise: each row divided by a scale of its own
// (quantize_rowwise_scale.h) and rounded to int8, or to int4 two to a byte. A
// first pass over the row finds the largest magnitudes, a second one, from the
// cache, divides and rounds; bound by reading the input.
#include "quantize_rowwise.h"

#include <cmath>
#include <cstring>
#include <tuple>

#include "cpu/pointwise/pointwise.h"
#include "cpu/pointwise/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"
#include "quantize_rowwise_scale.h"

namespace pkg::cpu {
namespace {

using simd::Vector;

// The largest magnitudes of either sign, zero where there are none.
template <class Number>
struct Magnitudes {
  Number positive;
  Number negative;
};

// Both NaN where a value is NaN.
template <class T>
Magnitudes<simd::Compute<T>> largest_magnitudes(const T* row, int64_t count) {
  using Number = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<Number>;
  constexpr int kChains = 4;
  Vector<Number> positive[kChains] = {};
  Vector<Number> negative[kChains] = {};
  const auto see = [&](int chain, Vector<Number> value) {
    positive[chain] = simd::max_or_nan(positive[chain], value);
    negative[chain] = simd::max_or_nan(negative[chain], -value);
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      see(chain, simd::load(row + i + chain * kLanes));
    }
  }
  for (; i < count; i += kLanes) {
    see(0, simd::load_up_to(row + i, count - i));
  }
  for (int chain = 1; chain < kChains; ++chain) {
    positive[0] = simd::max_or_nan(positive[0], positive[chain]);
    negative[0] = simd::max_or_nan(negative[0], negative[chain]);
  }
  // Of a row of zeros a maximum may be -0, which the sum makes 0.
  return {simd::reduce_max_or_nan(positive[0]) + Number(0),
          simd::reduce_max_or_nan(negative[0]) + Number(0)};
}

// value / scale, rounded to the nearest integer, to the even one of two.
template <class Number>
Vector<Number> quantized(Vector<Number> value, Number scale, Number least,
                         Number most) {
  // Adding it leaves no bits for fractions.
  constexpr Number kIntegers = sizeof(Number) == 4 ? 0x1.8p23 : 0x1.8p52;
  value /= scale;
  value = value > most ? simd::broadcast(most) : value;
  value = value < least ? simd::broadcast(least) : value;
  return (value + kIntegers) - kIntegers;
}

template <class T>
void quantize_values(const T* row, int64_t count, simd::Compute<T> scale,
                     int bits, int8_t* values) {
  using Number = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<Number>;
  using Integers = typename simd::VectorOf<int32_t, 4 * kLanes>::type;
  using Bytes = typename simd::VectorOf<int8_t, kLanes>::type;
  const auto least = static_cast<Number>(least_quantized(bits));
  const auto most = static_cast<Number>(most_quantized(bits));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector<Number> value = simd::load_up_to(row + i, count - i);
    const auto bytes = __builtin_convertvector(
        __builtin_convertvector(quantized<Number>(value, scale, least, most),
                                Integers),
        Bytes);
    std::memcpy(values + i, &bytes,
                static_cast<size_t>(std::min<int64_t>(kLanes, count - i)));
  }
}

void pack_pairs(const int8_t* values, int64_t pairs, int8_t* packed) {
  for (int64_t i = 0; i < pairs; ++i) {
    packed[i] = static_cast<int8_t>(
        (values[2 * i] & 0x0F) | static_cast<uint8_t>(values[2 * i + 1]) << 4);
  }
}

template <class T>
T quantize_row(const T* row, const QuantizeRowwisePlan& plan, int8_t* output) {
  using Number = simd::Compute<T>;
  const auto [positive, negative] = largest_magnitudes(row, plan.inner);
  const T rounded = convert<T>(rowwise_scale(positive, negative, plan.bits));
  // Values are divided by the scale that they will be multiplied with.
  const Number scale = convert<Number>(rounded);
  if (scale == 0 || !std::isfinite(scale)) {
    std::memset(output, 0, static_cast<size_t>(plan.row_bytes()));
  } else if (plan.bits == 8) {
    quantize_values(row, plan.inner, scale, plan.bits, output);
  } else {
    constexpr int64_t kRun = 2048;
    int8_t values[kRun];
    for (int64_t i = 0; i < plan.inner; i += kRun) {
      const int64_t count = std::min(kRun, plan.inner - i);
      quantize_values(row + i, count, scale, plan.bits, values);
      pack_pairs(values, count / 2, output + i / 2);
    }
  }
  return rounded;
}

template <class T>
void quantize_rows(const QuantizeRowwisePlan& plan, const TensorView& input,
                   int8_t* values, T* scales) {
  parallel_for(plan.rows, grain_of(kElementGrain, plan.inner),
               [&](int64_t begin, int64_t end) {
                 const ContiguousRows<T, Slot::FirstRow> rows(input);
                 for (int64_t row = begin; row < end; ++row) {
                   scales[row] = quantize_row(rows[row], plan,
                                              values + row * plan.row_bytes());
                 }
               });
}

std::tuple<Tensor, Tensor> quantize_rowwise(const TensorView& input,
                                            int64_t bits) {
  const QuantizeRowwisePlan plan = plan_quantize_rowwise(input, bits);
  auto [values, scales] = allocate_quantized(plan, input);
  auto* to = static_cast<int8_t*>(values.mutable_data_ptr());
  void* scales_to = scales.mutable_data_ptr();
  with_floating_type(plan.type, [&](auto example) {
    using T = decltype(example);
    quantize_rows<T>(plan, input, to, static_cast<T*>(scales_to));
  });
  return {values, scales};
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&quantize_rowwise>("quantize_rowwise");
}

}  // namespace
}  // namespace pkg::cpu
