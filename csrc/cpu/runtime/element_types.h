// From a dtype to the C++ type of its elements.
#pragma once

#include <cstdint>

#include "host/tensor.h"

namespace pkg::cpu {

// Calls function(T{}) for the element type of `type`.
template <class Function>
void with_floating_type(ScalarType type, const Function& function) {
  switch (type) {
    case ScalarType::Half:
      return function(Half{});
    case ScalarType::BFloat16:
      return function(BFloat16{});
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Double:
      return function(double{});
    default:
      fail("no CPU kernel computes with ", dtype_name(type));
  }
}

template <class Function>
void with_element_type(ScalarType type, const Function& function) {
  switch (type) {
    case ScalarType::Bool:
      return function(bool{});
    case ScalarType::Byte:
      return function(uint8_t{});
    case ScalarType::Char:
      return function(int8_t{});
    case ScalarType::Short:
      return function(int16_t{});
    case ScalarType::Int:
      return function(int32_t{});
    case ScalarType::Long:
      return function(int64_t{});
    default:
      return with_floating_type(type, function);
  }
}

}  // namespace pkg::cpu
