// Calls of operators through PyTorch's dispatcher, from C++.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/last_error.h"

namespace pkg {

namespace detail {

// An error that was raised in Python comes back as "RuntimeError: its words",
// followed by the Python frames; only the words are wanted.
inline std::string words_of(std::string message) {
  constexpr std::string_view kType = "RuntimeError: ";
  const size_t frames = message.find("\n\nAt:\n");
  if (frames != std::string::npos && message.starts_with(kType)) {
    message = message.substr(kType.size(), frames - kType.size());
  }
  return message;
}

}  // namespace detail

// Of an operator with one result, where this PyTorch tells what it refuses
// (last_error_function()). An exception that was raised in Python, below, is
// not of its class any more here.
template <class Result, class... Arguments>
Result dispatch(const char* name, const char* overload,
                const Arguments&... arguments) {
  std::array<StableIValue, std::max<size_t>(sizeof...(Arguments), 1)> stack{
      torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) !=
      TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(detail::words_of(last_error_function()()));
  }
  return torch::stable::detail::to<Result>(stack[0]);
}

}  // namespace pkg
