// The formula of an elementwise operator, stated once for every device.
//
// PKG_ELEMENTWISE names the operator, what dtypes it takes and its parameters,
// which are those of its schema, and is followed by the formula:
//
//   PKG_ELEMENTWISE(muladd, Takes::kNumbersAsFloating, Tensor a, Tensor b,
//                   Float c) {
//     return a * b + c;
//   }
//
// Tensor stands for what is computed at once: a vector register on the CPU, one
// number on CUDA, of the type in which the computation is done: float for half
// precision and float, double, or an integer. Float and Int, a schema's float
// and int, are one number of that type (so Float(0.5) is a constant of it), and
// Bool is a bool. Arithmetic, comparison and `condition ? x : y` are operators;
// other functions are in the namespace math, by one name for all devices:
//
//   abs, exp, expm1_of_nonpositive, log, max_or_nan, sigmoid, sqrt, tanh
//
// These take floating numbers. What arithmetic makes of integers,
// host/wrapping_integer.h says.
//
// This file needs nothing of PyTorch, so that tests can run the formulas as the
// CUDA kernels do; host/elementwise.h has the checks, the loop and the
// registration. A CUDA source defines PKG_ON_CUDA before it includes the
// formula's file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "host/wrapping_integer.h"

#ifdef PKG_ON_CUDA
#include "cuda/pointwise/formula_math.cuh"
#define PKG_FORMULA_INLINE __device__ __forceinline__
#else
#include "cpu/pointwise/formula_math.h"
#define PKG_FORMULA_INLINE [[gnu::always_inline]] inline
#endif

namespace pkg {

#ifdef PKG_ON_CUDA
namespace math = cuda::math;
#else
namespace math = cpu::math;
#endif

// What the tensors may be, and what becomes of their dtypes. All but kGradient
// broadcast and promote as PyTorch's operators do.
enum class Takes {
  kFloating,
  // bool and integers too, in which a formula without numbers is computed.
  kNumbers,
  // The same, but the result is floating: PyTorch's default dtype for integers.
  kNumbersAsFloating,
  // Floating tensors of one dtype and one shape: a gradient, and in the last
  // place the tensor it is of, as which the result is laid out.
  kGradient,
};

// The names in a list of parameters: "Tensor a, Float b" has a and b.
template <size_t kSize>
class ParameterNames {
 public:
  explicit consteval ParameterNames(const char (&parameters)[kSize]) {
    size_t count = 0;
    for (size_t i = 0; i < kSize; ++i) {
      const char c = parameters[i];
      text_[i] = c == ',' ? '\0' : c;
      if (c == ' ') {
        begins_[count] = i + 1;  // the last one stays
      } else if (c == ',') {
        ++count;
      }
    }
  }

  const char* operator[](size_t parameter) const {
    return text_.data() + begins_[parameter];
  }

 private:
  std::array<char, kSize> text_{};
  std::array<size_t, 16> begins_{};
};

namespace detail {

struct TensorParameter {};

template <class Signature>
struct CountParameters;
template <class... Parameters>
struct CountParameters<void(Parameters...)> {
  static constexpr size_t kAll = sizeof...(Parameters);
  static constexpr size_t kTensors =
      (size_t{std::is_same_v<Parameters, TensorParameter>} + ... + 0);
  static constexpr bool kTensorsAreFirst = [] {
    constexpr bool is_tensor[] = {
        std::is_same_v<Parameters, TensorParameter>...};
    for (size_t i = 0; i < kAll; ++i) {
      if (is_tensor[i] != (i < kTensors)) {
        return false;
      }
    }
    return true;
  }();
};

template <class V>
struct ElementIn {
  using type = V;
};
template <class V>
  requires requires(V vector) { vector[0]; }
struct ElementIn<V> {
  using type = std::remove_cvref_t<decltype(V{}[0])>;
};

}  // namespace detail

template <class Formula>
struct FormulaTraits {
  using Count = detail::CountParameters<typename Formula::template Parameters<
      detail::TensorParameter, double, int64_t, bool>>;
  static constexpr size_t kTensors = Count::kTensors;
  static constexpr size_t kNumbers = Count::kAll - kTensors;
  static constexpr bool kTakesIntegers = Formula::kTakes == Takes::kNumbers;
  static_assert(Count::kAll <= 16, "no formula takes so many parameters");
  static_assert(kTensors == 1 || kTensors == 2,
                "a formula takes one or two tensors");
  static_assert(Count::kTensorsAreFirst, "tensors come before numbers");
  static_assert(!kTakesIntegers || kNumbers == 0,
                "a formula with numbers is floating: kNumbersAsFloating");
};

// A formula with its numbers, as a function of elements (or vectors of them).
// On the CPU the numbers have the type of the computation, on CUDA, where one
// function serves every type, all are double.
template <class Formula, class Number>
struct BoundFormula {
  using Traits = FormulaTraits<Formula>;
  static constexpr int kInputs = static_cast<int>(Traits::kTensors);
  static constexpr bool kTakesIntegers = Traits::kTakesIntegers;

  // Never of length 0, which C++ does not know.
  Number numbers[Traits::kNumbers + (Traits::kNumbers == 0)] = {};

  template <class V, class... More>
  PKG_FORMULA_INLINE V operator()(V first, More... more) const {
    static_assert(1 + sizeof...(More) == Traits::kTensors);
    constexpr std::make_index_sequence<Traits::kNumbers> kEach;
    return static_cast<V>(
        compute(kEach, Computed<V>(first), Computed<V>(more)...));
  }

 private:
  template <size_t... number, class V, class... More>
  PKG_FORMULA_INLINE V compute(std::index_sequence<number...>, V first,
                               More... more) const {
    using Float = typename detail::ElementIn<V>::type;
    return Formula::template compute<V, Float, Float, bool>(first, more...,
                                                            numbers[number]...);
  }
};

}  // namespace pkg

// In namespace pkg.
#define PKG_ELEMENTWISE(name, takes, ...)                        \
  struct name##_formula {                                        \
    static constexpr const char* kName = #name;                  \
    static constexpr ::pkg::Takes kTakes = takes;                \
    static constexpr ::pkg::ParameterNames kNames{#__VA_ARGS__}; \
    template <class Tensor, class Float, class Int, class Bool>  \
    using Parameters = void(__VA_ARGS__);                        \
    template <class Tensor, class Float, class Int, class Bool>  \
    PKG_FORMULA_INLINE static Tensor compute(__VA_ARGS__);       \
  };                                                             \
  PKG_REGISTER_FORMULA(name)                                     \
  template <class Tensor, class Float, class Int, class Bool>    \
  PKG_FORMULA_INLINE Tensor name##_formula::compute(__VA_ARGS__)

#ifdef PKG_FORMULAS_ALONE
#define PKG_REGISTER_FORMULA(name)
#endif
