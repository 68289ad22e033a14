// Calls of operators through PyTorch's dispatcher, from C++.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "host/symbol_lookup.h"
#include "host/tensor.h"

namespace pkg {

namespace detail {

template <class Result>
struct ResultOf {
  static constexpr size_t kCount = 1;
  static Result take(StableIValue* stack) {
    return torch::stable::detail::to<Result>(stack[0]);
  }
};

template <>
struct ResultOf<void> {
  static constexpr size_t kCount = 0;
  static void take(StableIValue*) {}
};

template <class... Results>
struct ResultOf<std::tuple<Results...>> {
  static constexpr size_t kCount = sizeof...(Results);
  static std::tuple<Results...> take(StableIValue* stack) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return std::tuple<Results...>{
          torch::stable::detail::to<Results>(stack[i])...};
    }(std::index_sequence_for<Results...>{});
  }
};

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

// From PyTorch 2.13 on the message of a failed call can be had. Before, it goes
// to stderr and the caller learns only that the call failed: check first.
inline bool dispatch_errors_have_messages() {
  return last_error_function() != nullptr;
}

template <class Result, class... Arguments>
Result dispatch(const char* name, const char* overload,
                const Arguments&... arguments) {
  std::array<StableIValue,
             std::max(sizeof...(Arguments), detail::ResultOf<Result>::kCount)>
      stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) !=
      TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(
        dispatch_errors_have_messages()
            ? detail::words_of(last_error_function()())
            : std::string(name) + " failed; PyTorch printed why on stderr");
  }
  return detail::ResultOf<Result>::take(stack.data());
}

}  // namespace pkg
