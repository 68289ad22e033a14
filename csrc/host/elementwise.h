// Elementwise operators whole: a source with a PKG_ELEMENTWISE (host/formula.h)
// and this header has its checks, its kernel and its registration, on the
// device that it is compiled for. With PKG_FORMULAS_ALONE it has the formula
// alone.
#pragma once

#include "host/formula.h"

#ifndef PKG_FORMULAS_ALONE

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <utility>

#include "host/alike.h"
#include "host/namespace.h"
#include "host/pointwise.h"

#ifdef PKG_ON_CUDA
#include "cuda/pointwise/elementwise.h"
#define PKG_FORMULA_KEY PKG_CUDA_DISPATCH_KEY
#else
#include "cpu/pointwise/elementwise.h"
#define PKG_FORMULA_KEY CPU
#endif

namespace pkg {

#ifdef PKG_ON_CUDA
namespace device = cuda;
#else
namespace device = cpu;
#endif

template <size_t kTensors>
using Tensors = std::array<const TensorView*, kTensors>;
template <size_t kTensors>
using TensorNames = std::array<const char*, kTensors>;

// Floating or any number each, of one device, and, for a gradient, alike.
template <size_t kTensors>
void check_elementwise(const char* op, Takes takes,
                       const TensorNames<kTensors>& names,
                       const Tensors<kTensors>& tensors) {
  const bool is_floating =
      takes == Takes::kFloating || takes == Takes::kGradient;
  for (size_t i = 0; i < kTensors; ++i) {
    (is_floating ? check_floating : check_pointwise_dtype)(op, names[i],
                                                           *tensors[i]);
  }
  if constexpr (kTensors == 2) {
    const size_t first = takes == Takes::kGradient ? 1 : 0;
    check_same_device(op, names[first], *tensors[first], names[1 - first],
                      *tensors[1 - first]);
    if (takes == Takes::kGradient) {
      check_same_dtype(op, names[0], *tensors[0], names[1], *tensors[1]);
      check_same_shape(op, names[0], *tensors[0], names[1], *tensors[1]);
    }
  }
}

// The dtype that is computed in.
template <size_t kTensors>
ScalarType elementwise_type(Takes takes, const Tensors<kTensors>& tensors) {
  const ScalarType type = result_type(*tensors.front(), *tensors.back());
  return takes == Takes::kNumbersAsFloating && !is_floating(type)
             ? default_dtype()
             : type;
}

template <size_t kTensors>
PointwisePlan<static_cast<int>(kTensors) + 1> plan_elementwise(
    const Shape& shape, ScalarType type, const Tensors<kTensors>& tensors,
    Takes takes, Steps steps) {
  if constexpr (kTensors == 1) {
    return plan_pointwise<2>(shape, type, {nullptr, tensors[0]}, steps);
  } else if (takes == Takes::kGradient) {
    // The operand after the output is the one whose layout counts most.
    auto plan = plan_pointwise<3>(shape, type,
                                  {nullptr, tensors[1], tensors[0]}, steps);
    auto& strides = plan.loop.strides;
    std::swap_ranges(strides[1].begin(), strides[1].begin() + plan.loop.dims,
                     strides[2].begin());
    return plan;
  } else {
    return plan_pointwise<3>(shape, type, {nullptr, tensors[0], tensors[1]},
                             steps);
  }
}

// The kernel of an operator: Signature has the types of its arguments.
template <class Formula,
          class Signature = typename Formula::template Parameters<
              const TensorView&, double, int64_t, bool>>
struct ElementwiseOperator;

template <class Formula, class... Parameters>
struct ElementwiseOperator<Formula, void(Parameters...)> {
  using Traits = FormulaTraits<Formula>;
  static constexpr size_t kTensors = Traits::kTensors;

  static Tensor call(Parameters... arguments) {
    const std::tuple<Parameters...> all(arguments...);
    return [&]<size_t... tensor, size_t... number>(
               std::index_sequence<tensor...>, std::index_sequence<number...>) {
      return run({&std::get<tensor>(all)...}, {Formula::kNames[tensor]...},
                 {static_cast<double>(std::get<kTensors + number>(all))...});
    }(std::make_index_sequence<kTensors>(),
           std::make_index_sequence<Traits::kNumbers>());
  }

 private:
  static Tensor run(const Tensors<kTensors>& tensors,
                    const TensorNames<kTensors>& names,
                    const std::array<double, Traits::kNumbers>& numbers) {
    constexpr const char* kOp = Formula::kName;
    check_elementwise(kOp, Formula::kTakes, names, tensors);
    const Shape shape =
        broadcast_shapes(kOp, tensors.front()->sizes, tensors.back()->sizes,
                         names.front(), names.back());
    const ScalarType type = elementwise_type(Formula::kTakes, tensors);
    const auto [output, loop] = plan_elementwise(
        shape, type, tensors, Formula::kTakes,
        Traits::kNumbers > 0 ? Steps::kThenNumber : Steps::kOne);
    device::run_formula<Formula>(type, loop, output, tensors, numbers);
    return output;
  }
};

}  // namespace pkg

#define PKG_REGISTER_FORMULA(name)                                            \
  namespace name##_registration {                                             \
    PKG_IMPLEMENT(PKG_FORMULA_KEY, library) {                                 \
      library.impl<&::pkg::ElementwiseOperator<name##_formula>::call>(#name); \
    }                                                                         \
  }

#endif  // PKG_FORMULAS_ALONE
