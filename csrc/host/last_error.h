// What PyTorch said of a call of its C functions that failed.
#pragma once

#include "host/symbol_lookup.h"

namespace pkg {

using LastError = const char* (*)();

// From PyTorch 2.13 on; null before, where it goes to stderr and the caller
// learns only that the call failed.
inline LastError last_error_function() {
  static const auto function = find_torch_symbol<LastError>(
      "torch_exception_get_what_without_backtrace");
  return function;
}

}  // namespace pkg
