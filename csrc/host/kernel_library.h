// How an operator's kernel is registered: with PyTorch's dispatcher, and for
// the CPU also by name in a table of its own library, through which pkg._C
// enters it where the dispatcher would have nothing else to do
// (csrc/python/operator_call.cpp).
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "host/compiler.h"
#include "host/tensor.h"
#include "host/text.h"

namespace pkg {

inline constexpr size_t kMaxResults = 5;

// A list of integers that needs no memory of its own.
struct IntegerList {
  static constexpr size_t kMost = 8;
  std::array<int64_t, kMost> values;
  size_t count = 0;
};

// An argument as Python gives it: None, a tensor, one that is written to, a
// number, a text, a dtype or a list of integers.
using DirectArgument =
    std::variant<std::monostate, TensorView, WritableView, double, int64_t,
                 bool, std::string_view, ScalarType, IntegerList>;
using DirectResults = std::array<std::optional<Tensor>, kMaxResults>;

// False where the arguments' types are not the kernel's.
using DirectKernel = bool (*)(const DirectArgument* arguments, size_t count,
                              DirectResults& results);

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
struct OnTensor {
  using type = T;
};
template <>
struct OnTensor<const TensorView&> {
  using type = const Tensor&;
};
template <>
struct OnTensor<const WritableView&> {
  using type = const Tensor&;
};
template <>
struct OnTensor<const std::optional<TensorView>&> {
  using type = const std::optional<Tensor>&;
};

// A function on views, for the dispatcher, which passes tensors, and for calls
// without it.
template <auto function>
struct KernelEntry;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct KernelEntry<function> {
  template <class T>
  using Value = std::remove_cvref_t<T>;

  static constexpr bool kIsDirect =
      !(std::is_same_v<Value<Arguments>, Tensor> || ...);

  static Result dispatched(typename OnTensor<Arguments>::type... arguments) {
    return function(arguments...);
  }

  static bool direct(const DirectArgument* arguments, size_t count,
                     DirectResults& results) {
    return count == sizeof...(Arguments) &&
           enter(arguments, results, std::index_sequence_for<Arguments...>{});
  }

 private:
  using Integers = std::vector<int64_t>;

  // What holds an argument of this type.
  template <class T>
  using Held = std::conditional_t<
      std::is_same_v<T, Text>, std::string_view,
      std::conditional_t<std::is_same_v<T, Integers>, IntegerList, T>>;

  template <class T>
  static bool fits(const DirectArgument& argument) {
    if constexpr (is_optional<T>) {
      return std::holds_alternative<std::monostate>(argument) ||
             fits<typename T::value_type>(argument);
    } else {
      return std::holds_alternative<Held<T>>(argument);
    }
  }

  template <class T>
  static T get(const DirectArgument& argument) {
    if constexpr (is_optional<T>) {
      return std::holds_alternative<std::monostate>(argument)
                 ? T()
                 : T(get<typename T::value_type>(argument));
    } else if constexpr (std::is_same_v<T, Text>) {
      return Text{std::string(*std::get_if<std::string_view>(&argument))};
    } else if constexpr (std::is_same_v<T, Integers>) {
      const auto& list = *std::get_if<IntegerList>(&argument);
      return Integers(list.values.begin(), list.values.begin() + list.count);
    } else {
      return *std::get_if<T>(&argument);
    }
  }

  template <size_t... i>
  static bool enter(const DirectArgument* arguments, DirectResults& results,
                    std::index_sequence<i...>) {
    if (!(fits<Value<Arguments>>(arguments[i]) && ...)) {
      return false;
    }
    if constexpr (std::is_void_v<Result>) {
      function(get<Value<Arguments>>(arguments[i])...);
    } else {
      store(function(get<Value<Arguments>>(arguments[i])...), results);
    }
    return true;
  }

  static void store(Tensor&& result, DirectResults& results) {
    results[0] = std::move(result);
  }

  template <class... Tensors>
  static void store(std::tuple<Tensors...>&& tensors, DirectResults& results) {
    static_assert(sizeof...(Tensors) <= kMaxResults);
    [&]<size_t... i>(std::index_sequence<i...>) {
      ((results[i] = std::move(std::get<i>(tensors))), ...);
    }(std::index_sequence_for<Tensors...>{});
  }
};

}  // namespace detail

struct DirectKernels {
  struct Entry {
    std::string_view name;
    DirectKernel kernel;
  };

  std::array<Entry, 64> entries;
  size_t count = 0;

  void add(const char* name, DirectKernel kernel) {
    entries.at(count++) = {name, kernel};
  }

  DirectKernel find(std::string_view name) const {
    for (size_t i = 0; i < count; ++i) {
      if (entries[i].name == name) {
        return entries[i].kernel;
      }
    }
    return nullptr;
  }
};

// One a library, since names are hidden unless they are exported. A constant,
// so that it is there before the static initialisers that fill it.
inline constinit DirectKernels direct_kernels{};

// What PKG_IMPLEMENT gives.
class KernelLibrary {
 public:
  KernelLibrary(torch::stable::detail::StableLibrary& dispatcher,
                std::string_view key)
      : dispatcher_(dispatcher), is_cpu_(key == "CPU") {}

  // A kernel: a function on tensors or views of them, numbers, texts and lists.
  // On the CPU one without a `const Tensor&` among its arguments is entered
  // without the dispatcher too: it writes to nothing but its results and what
  // it takes as a WritableView, and refuses what it cannot do before it writes.
  template <auto function>
  void impl(const char* name) {
    using Entry = detail::KernelEntry<function>;
    dispatcher_.impl(name, TORCH_BOX(&Entry::dispatched));
    if constexpr (Entry::kIsDirect) {
      if (is_cpu_) {
        direct_kernels.add(name, &Entry::direct);
      }
    }
  }

  // What a composite operator does in the plain case, for direct calls alone:
  // it throws an ArgumentError where the composite has more to do.
  template <auto function>
  void impl_directly(const char* name) {
    direct_kernels.add(name, &detail::KernelEntry<function>::direct);
  }

 private:
  torch::stable::detail::StableLibrary& dispatcher_;
  bool is_cpu_;
};

}  // namespace pkg

// Null where the library has no such kernel for direct calls.
extern "C" PKG_EXPORT inline pkg::DirectKernel pkg_direct_kernel(
    const char* name) {
  return pkg::direct_kernels.find(name);
}
