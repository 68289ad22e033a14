// Vectors of one register, over the compiler's vector extensions: arithmetic,
// comparison and selection are operators, the rest are the functions below. The
// width follows the instruction set that the including library is compiled
// for; nothing here is chosen at run time.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pkg::simd {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif

template <class T, int kBytes = kVectorBytes>
struct VectorOf {
  using type [[gnu::vector_size(kBytes)]] = T;
};

template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The type that arithmetic on T is done in.
template <class T>
struct ComputeOf {
  using type = T;
};
template <>
struct ComputeOf<Half> {
  using type = float;
};
template <>
struct ComputeOf<BFloat16> {
  using type = float;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class T>
inline Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // x - 0 keeps -0.0 and NaN as they are
}

namespace detail {

// 16-bit lanes that widen to one vector of 32-bit lanes.
using Bits16 = typename VectorOf<uint16_t, kVectorBytes / 2>::type;
using Bits32 = Vector<uint32_t>;

// Widening conversions by name: GCC 12 splits __builtin_convertvector in two,
// or takes the lanes one by one.
inline Bits32 widen(Bits16 bits) {
#if defined(__AVX512F__)
  return std::bit_cast<Bits32>(
      _mm512_maskz_cvtepu16_epi32(0xFFFF, std::bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  return std::bit_cast<Bits32>(
      _mm256_cvtepu16_epi32(std::bit_cast<__m128i>(bits)));
#elif defined(__aarch64__)
  return std::bit_cast<Bits32>(vmovl_u16(std::bit_cast<uint16x4_t>(bits)));
#else
  return __builtin_convertvector(bits, Bits32);
#endif
}

inline Vector<float> float_of_bfloat16_bits(Bits16 bits) {
#if defined(__aarch64__)
  return std::bit_cast<Vector<float>>(
      vshll_n_u16(std::bit_cast<uint16x4_t>(bits), 16));
#else
  return std::bit_cast<Vector<float>>(widen(bits) << 16);
#endif
}

// Round to nearest even; NaN keeps its sign and becomes quiet.
#if defined(__AVX512BF16__)
// Which VCVTNEPS2BF16 flushes to zero.
template <class... Values>
inline bool has_denormals(Values... values) {
  constexpr int kDenormal = 0x20;
  return (_mm512_fpclass_ps_mask(std::bit_cast<__m512>(values), kDenormal) |
          ...) != 0;
}
#endif
inline Bits16 bfloat16_bits_of_float(Vector<float> value) {
#if defined(__AVX512BF16__)
  if (!has_denormals(value)) [[likely]] {
    return std::bit_cast<Bits16>(
        _mm512_cvtneps_pbh(std::bit_cast<__m512>(value)));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return std::bit_cast<Bits16>(
      vcvt_bf16_f32(std::bit_cast<float32x4_t>(value)));
#endif
  const Bits32 bits = std::bit_cast<Bits32>(value);
  const Bits32 rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const Bits32 quiet_nan = (bits >> 16) | 0x0040U;
  return __builtin_convertvector(value == value ? rounded : quiet_nan, Bits16);
}

#if defined(__AVX512F__)
inline Vector<float> float_of_half_bits(Bits16 bits) {
  return std::bit_cast<Vector<float>>(
      _mm512_maskz_cvtph_ps(0xFFFF, std::bit_cast<__m256i>(bits)));
}
inline Bits16 half_bits_of_float(Vector<float> value) {
  return std::bit_cast<Bits16>(_mm512_maskz_cvtps_ph(
      0xFFFF, std::bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && defined(__AVX2__)
inline Vector<float> float_of_half_bits(Bits16 bits) {
  return std::bit_cast<Vector<float>>(
      _mm256_cvtph_ps(std::bit_cast<__m128i>(bits)));
}
inline Bits16 half_bits_of_float(Vector<float> value) {
  return std::bit_cast<Bits16>(
      _mm256_cvtps_ph(std::bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
inline Vector<float> float_of_half_bits(Bits16 bits) {
  return std::bit_cast<Vector<float>>(
      vcvt_f32_f16(std::bit_cast<float16x4_t>(bits)));
}
inline Bits16 half_bits_of_float(Vector<float> value) {
  return std::bit_cast<Bits16>(vcvt_f16_f32(std::bit_cast<float32x4_t>(value)));
}
#else
// Without a conversion instruction: scale by a power of two so that the
// hardware's own arithmetic normalises, denormalises and rounds.
inline Vector<float> float_of_half_bits(Bits16 bits) {
  const Bits32 wide = __builtin_convertvector(bits, Bits32);
  const Bits32 sign = (wide & 0x8000U) << 16;
  const Bits32 magnitude = (wide & 0x7FFFU) << 13;
  // 2^112 moves the exponent bias from 15 to 127, denormal numbers included.
  const Vector<float> scaled =
      std::bit_cast<Vector<float>>(magnitude) * 0x1p112F;
  const Bits32 infinite_or_nan = magnitude | 0x7F800000U;
  const Bits32 result = magnitude >= 0x0F800000U
                            ? infinite_or_nan
                            : std::bit_cast<Bits32>(scaled);
  return std::bit_cast<Vector<float>>(result | sign);
}
inline Bits16 half_bits_of_float(Vector<float> value) {
  const Bits32 bits = std::bit_cast<Bits32>(value);
  const Bits32 sign = bits & 0x80000000U;
  const Bits32 magnitude = bits ^ sign;
  // Below 2^-14 the half is denormal: adding 0.5 aligns its last bit with that
  // of the float, and the addition rounds to nearest even.
  const Bits32 denormal =
      std::bit_cast<Bits32>(std::bit_cast<Vector<float>>(magnitude) + 0.5F) -
      0x3F000000U;
  const Bits32 normal =
      (magnitude - (112U << 23) + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13;
  const Bits32 nan_or_infinity = magnitude > 0x7F800000U
                                     ? (0x7E00U | ((magnitude >> 13) & 0x3FFU))
                                     : Bits32{} + 0x7C00U;
  const Bits32 result = magnitude < 0x38800000U   ? denormal
                        : magnitude < 0x477FF000U ? normal
                                                  : nan_or_infinity;
  return __builtin_convertvector(result | (sign >> 16), Bits16);
}
#endif

}  // namespace detail

// Loads kLanes<Compute<T>> elements as the type that arithmetic is done in.
template <class T>
inline Vector<Compute<T>> load(const T* from) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    detail::Bits16 bits;
    std::memcpy(&bits, from, sizeof(bits));
    if constexpr (std::is_same_v<T, Half>) {
      return detail::float_of_half_bits(bits);
    } else {
      return detail::float_of_bfloat16_bits(bits);
    }
  } else {
    Vector<T> value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
}

template <class T>
inline void store(T* to, Vector<Compute<T>> value) {
  if constexpr (std::is_same_v<T, Half>) {
    const auto bits = detail::half_bits_of_float(value);
    std::memcpy(static_cast<void*>(to), &bits, sizeof(bits));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = detail::bfloat16_bits_of_float(value);
    std::memcpy(static_cast<void*>(to), &bits, sizeof(bits));
  } else {
    std::memcpy(to, &value, sizeof(value));
  }
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// As bfloat16, one or two registers of numbers that are not denormal: VCVTNE
// makes zeros of those.
inline detail::Bits16 bfloat16_of_normals(Vector<float> values) {
#if defined(__aarch64__)
  return detail::bfloat16_bits_of_float(values);
#else
  return std::bit_cast<detail::Bits16>(
      _mm512_cvtneps_pbh(std::bit_cast<__m512>(values)));
#endif
}
inline Vector<uint32_t> bfloat16_of_normals(Vector<float> first,
                                            Vector<float> second) {
#if defined(__aarch64__)
  return std::bit_cast<Vector<uint32_t>>(
      vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(std::bit_cast<float32x4_t>(first)),
                          std::bit_cast<float32x4_t>(second)));
#else
  return std::bit_cast<Vector<uint32_t>>(_mm512_cvtne2ps_pbh(
      std::bit_cast<__m512>(second), std::bit_cast<__m512>(first)));
#endif
}
#endif

// Two registers, one behind the other.
template <class T>
inline void store_pair(T* to, Vector<Compute<T>> first,
                       Vector<Compute<T>> second) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (!detail::has_denormals(first, second)) [[likely]] {
      const auto bits = bfloat16_of_normals(first, second);
      std::memcpy(static_cast<void*>(to), &bits, sizeof(bits));
      return;
    }
  }
#endif
  store(to, first);
  store(to + kLanes<Compute<T>>, second);
}

// The same of numbers that are not denormal.
inline void store_normal_pair(BFloat16* to, Vector<float> first,
                              Vector<float> second) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto bits = bfloat16_of_normals(first, second);
  std::memcpy(static_cast<void*>(to), &bits, sizeof(bits));
#else
  store_pair(to, first, second);
#endif
}

// The first `count` lanes, 0 <= count <= kLanes; the other lanes are zero.
template <class T>
inline Vector<Compute<T>> load_partial(const T* from, int count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    return std::bit_cast<Vector<T>>(_mm512_maskz_loadu_ps(mask, from));
  } else if constexpr (std::is_same_v<T, double>) {
    const auto mask = static_cast<__mmask8>((1U << count) - 1U);
    return std::bit_cast<Vector<T>>(_mm512_maskz_loadu_pd(mask, from));
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    return std::bit_cast<Vector<T>>(_mm512_maskz_loadu_epi32(mask, from));
  }
#endif
  T lanes[kLanes<Compute<T>>] = {};
  std::memcpy(static_cast<void*>(lanes), from,
              static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

// The same, with `fill` in the other lanes, as -inf where a maximum is sought.
template <class T>
inline Vector<Compute<T>> load_partial(const T* from, int count,
                                       Compute<T> fill) {
  using Lane = std::conditional_t<sizeof(Compute<T>) == 4, int32_t, int64_t>;
  Vector<Lane> lane = {};
  for (int i = 0; i < kLanes<Lane>; ++i) {
    lane[i] = i;  // a constant, to the compiler
  }
  return lane < static_cast<Lane>(count) ? load_partial(from, count)
                                         : broadcast(fill);
}

template <class T>
inline void store_partial(T* to, Vector<Compute<T>> value, int count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    return _mm512_mask_storeu_ps(to, mask, std::bit_cast<__m512>(value));
  } else if constexpr (std::is_same_v<T, double>) {
    const auto mask = static_cast<__mmask8>((1U << count) - 1U);
    return _mm512_mask_storeu_pd(to, mask, std::bit_cast<__m512d>(value));
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1U);
    return _mm512_mask_storeu_epi32(to, mask, std::bit_cast<__m512i>(value));
  }
#endif
  T lanes[kLanes<Compute<T>>];
  store(lanes, value);
  std::memcpy(static_cast<void*>(to), lanes,
              static_cast<size_t>(count) * sizeof(T));
}

// A register of the elements that are left of a run, whole but for the last
// one: what load_partial and store_partial do for `left` < kLanes.
template <class T, class... Fill>
inline Vector<Compute<T>> load_up_to(const T* from, int64_t left,
                                     Fill... fill) {
  return left < kLanes<Compute<T>>
             ? load_partial(from, static_cast<int>(left), fill...)
             : load(from);
}

template <class T>
inline void store_up_to(T* to, Vector<Compute<T>> value, int64_t left) {
  left < kLanes<Compute<T>> ? store_partial(to, value, static_cast<int>(left))
                            : store(to, value);
}

// The larger value, and NaN where either is NaN.
template <class V>
inline V max_or_nan(V a, V b) {
#if defined(__aarch64__)
  if constexpr (std::is_same_v<V, Vector<float>>) {
    return std::bit_cast<V>(vmaxq_f32(std::bit_cast<float32x4_t>(a),
                                      std::bit_cast<float32x4_t>(b)));
  } else if constexpr (std::is_same_v<V, Vector<double>>) {
    return std::bit_cast<V>(vmaxq_f64(std::bit_cast<float64x2_t>(a),
                                      std::bit_cast<float64x2_t>(b)));
  }
#endif
  const V larger = a > b ? a : b;
  return a == a ? larger : a;  // where b is NaN the comparison chose b
}

template <class V>
inline auto reduce_add(V value) {
#if defined(__aarch64__)
  using T = std::remove_cvref_t<decltype(value[0])>;
  if constexpr (std::is_same_v<T, float>) {
    return vaddvq_f32(std::bit_cast<float32x4_t>(value));
  } else if constexpr (std::is_same_v<T, double>) {
    return vaddvq_f64(std::bit_cast<float64x2_t>(value));
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return vaddvq_s32(std::bit_cast<int32x4_t>(value));
  }
#endif
  auto sum = value[0];
  for (size_t lane = 1; lane < sizeof(V) / sizeof(sum); ++lane) {
    sum += value[lane];
  }
  return sum;
}

// The largest lane, and NaN where any lane is NaN.
template <class V>
inline auto reduce_max_or_nan(V value) {
  using T = std::remove_cvref_t<decltype(value[0])>;
#if defined(__aarch64__)
  if constexpr (std::is_same_v<T, float>) {
    return vmaxvq_f32(std::bit_cast<float32x4_t>(value));
  } else if constexpr (std::is_same_v<T, double>) {
    return vmaxvq_f64(std::bit_cast<float64x2_t>(value));
  }
#endif
  if constexpr (sizeof(V) > 16) {
    struct Halves {
      typename VectorOf<T, sizeof(V) / 2>::type low, high;
    };
    const auto halves = std::bit_cast<Halves>(value);
    return reduce_max_or_nan(max_or_nan(halves.low, halves.high));
  } else {
    T largest = value[0];
    for (size_t lane = 1; lane < sizeof(V) / sizeof(T); ++lane) {
      largest = max_or_nan<T>(largest, value[lane]);
    }
    return largest;
  }
}

// Whether any bit of any lane is set.
template <class V>
inline bool any_bit(V value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    return _mm512_test_epi64_mask(std::bit_cast<__m512i>(value),
                                  std::bit_cast<__m512i>(value)) != 0;
  }
#endif
  auto bits = value[0];
  for (size_t lane = 1; lane < sizeof(V) / sizeof(bits); ++lane) {
    bits |= value[lane];
  }
  return bits != 0;
}

// A step for several registers, side by side: a processor's scheduler holds
// about three chains of an exponential's length, so that what is to run at the
// same time must stand at the same place (exponentials are 1.4 times faster on
// Zen 4 with three registers than one by one).
template <size_t kCount, class Body>
[[gnu::always_inline]] inline void each(const Body& body) {
  if constexpr (kCount == 1) {
    body(0);
  } else {
#pragma GCC unroll 8
    for (size_t i = 0; i < kCount; ++i) {
      body(i);
    }
  }
}

}  // namespace pkg::simd
