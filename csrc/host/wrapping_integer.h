// Integers as elementwise operators compute with them, on every device.
//
// They are computed as what they are, in 32 bits or in 64, as C++ promotes
// them: so a comparison and a division see the sign. But a sum or a product
// that does not fit wraps, which C++ leaves undefined for signed integers, and
// a division has a result where a processor would trap: by zero it is zero, and
// that of the least integer by -1 wraps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "host/compiler.h"

namespace pkg {

template <class Value>
class WrappingInteger {
  using Bits = std::make_unsigned_t<Value>;

 public:
  WrappingInteger() = default;
  PKG_HOST_DEVICE constexpr WrappingInteger(Value value) : value_(value) {}

  template <class To>
  PKG_HOST_DEVICE constexpr explicit operator To() const {
    return static_cast<To>(value_);
  }

  PKG_HOST_DEVICE constexpr WrappingInteger operator-() const {
    return wrapped(-bits());
  }
  PKG_HOST_DEVICE friend constexpr WrappingInteger operator+(
      WrappingInteger a, WrappingInteger b) {
    return wrapped(a.bits() + b.bits());
  }
  PKG_HOST_DEVICE friend constexpr WrappingInteger operator-(
      WrappingInteger a, WrappingInteger b) {
    return wrapped(a.bits() - b.bits());
  }
  PKG_HOST_DEVICE friend constexpr WrappingInteger operator*(
      WrappingInteger a, WrappingInteger b) {
    return wrapped(a.bits() * b.bits());
  }
  PKG_HOST_DEVICE friend constexpr WrappingInteger operator/(
      WrappingInteger a, WrappingInteger b) {
    if (b.value_ == 0) {
      return Value(0);
    }
    return b.value_ == -1 ? -a : WrappingInteger(a.value_ / b.value_);
  }

  // Each by itself: what C++ makes of <=> are functions of the host, which
  // device code may call with --expt-relaxed-constexpr alone.
  PKG_HOST_DEVICE friend constexpr bool operator==(WrappingInteger a,
                                                   WrappingInteger b) {
    return a.value_ == b.value_;
  }
  PKG_HOST_DEVICE friend constexpr bool operator!=(WrappingInteger a,
                                                   WrappingInteger b) {
    return a.value_ != b.value_;
  }
  PKG_HOST_DEVICE friend constexpr bool operator<(WrappingInteger a,
                                                  WrappingInteger b) {
    return a.value_ < b.value_;
  }
  PKG_HOST_DEVICE friend constexpr bool operator>(WrappingInteger a,
                                                  WrappingInteger b) {
    return a.value_ > b.value_;
  }
  PKG_HOST_DEVICE friend constexpr bool operator<=(WrappingInteger a,
                                                   WrappingInteger b) {
    return a.value_ <= b.value_;
  }
  PKG_HOST_DEVICE friend constexpr bool operator>=(WrappingInteger a,
                                                   WrappingInteger b) {
    return a.value_ >= b.value_;
  }

 private:
  PKG_HOST_DEVICE constexpr Bits bits() const {
    return static_cast<Bits>(value_);
  }
  PKG_HOST_DEVICE static constexpr WrappingInteger wrapped(Bits bits) {
    return static_cast<Value>(bits);
  }

  Value value_;
};

namespace detail {

template <class V>
struct ComputedAs {
  using type = V;
};
template <class V>
  requires std::is_integral_v<V>
struct ComputedAs<V> {
  using type = WrappingInteger<
      std::conditional_t<sizeof(V) == sizeof(int64_t), int64_t, int32_t>>;
};

}  // namespace detail

// What elements, or vectors of them, are computed as: themselves, or wrapping
// integers. A bool, of which any result but 0 is true, is an integer too.
template <class V>
using Computed = typename detail::ComputedAs<V>::type;

}  // namespace pkg
