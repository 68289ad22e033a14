// Types of elements by the names that requests have for them.
#pragma once

#include <string>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/tf32.cuh"
#include "request.h"

namespace pkg::emulation {

template <class Element>
inline constexpr const char* kNameOf = nullptr;
template <>
inline constexpr const char* kNameOf<double> = "float64";
template <>
inline constexpr const char* kNameOf<float> = "float32";
template <>
inline constexpr const char* kNameOf<cuda::Tf32> = "tf32";
template <>
inline constexpr const char* kNameOf<cuda::float16> = "float16";
template <>
inline constexpr const char* kNameOf<cuda::bfloat16> = "bfloat16";
template <>
inline constexpr const char* kNameOf<int8_t> = "int8";

// The element of a tensor that is multiplied as one of these types.
template <class Element>
using StoredElement =
    std::conditional_t<std::is_same_v<Element, cuda::Tf32>, float, Element>;

// Whether the kernels of a type are compiled: of every type, but where a test
// plants a fault and names those that it runs, -DPKG_EMULATED_TYPES=float.
#ifdef PKG_EMULATED_TYPES
template <class Element, class... Chosen>
inline constexpr bool kIsAmong = (std::is_same_v<Element, Chosen> || ...);
template <class Element>
inline constexpr bool kIsCompiled = kIsAmong<Element, PKG_EMULATED_TYPES>;
#else
template <class Element>
inline constexpr bool kIsCompiled = true;
#endif

// Calls function.operator()<Element>() for the one of the types that has this
// name; false where none has.
template <class... Elements, class Function>
bool with_type(const std::string& name, Function&& function) {
  const auto call = [&]<class Element>() {
    if constexpr (kIsCompiled<Element>) {
      function.template operator()<Element>();
    } else {
      fail("this program was compiled without the kernels for " + name);
    }
    return true;
  };
  return ((name == kNameOf<Elements> && call.template operator()<Elements>()) ||
          ...);
}

}  // namespace pkg::emulation
