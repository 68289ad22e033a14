// Argument checks whose message is only the words given: what the argument
// is, what it must be and what to do, without a source location.
#pragma once

#include <sstream>
#include <stdexcept>

namespace pkg {

// An argument that an operator refuses. A RuntimeError in Python, as PyTorch's
// own operators raise.
class ArgumentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Words>
[[noreturn]] [[gnu::cold]] [[gnu::noinline]] void fail(const Words&... words) {
  std::ostringstream message;
  (message << ... << words);
  throw ArgumentError(message.str());
}

}  // namespace pkg

#define PKG_CHECK(condition, ...)    \
  do {                               \
    if (!(condition)) [[unlikely]] { \
      ::pkg::fail(__VA_ARGS__);      \
    }                                \
  } while (false)
