// Strings as arguments of operators. The headers of PyTorch below 2.15 take a
// std::string too, and lose the memory of one at every call.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace pkg {

struct Text {
  std::string value;
};

}  // namespace pkg

namespace torch::stable::detail {

template <>
struct ToImpl<pkg::Text> {
  static pkg::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    pkg::Text text{std::string(data, length)};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

template <>
struct FromImpl<pkg::Text> {
  static StableIValue call(const pkg::Text& text, uint64_t, bool) {
    StringHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_new_string_handle(
        text.value.c_str(), text.value.length(), &handle));
    return torch::stable::detail::from(handle);
  }
};

}  // namespace torch::stable::detail
