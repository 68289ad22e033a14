// The vectors of csrc/cpu/simd and the functions of formulas, for
// tests/test_simd.py to call: compiled for one instruction set.
#include <cstdint>

#include "cpu/pointwise/formula_math.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace {

namespace math = pkg::cpu::math;
namespace simd = pkg::simd;
using simd::BFloat16;
using simd::Half;

template <class T, class Function>
void apply(const T* from, T* to, int64_t count, const Function& function) {
  for (int64_t i = 0; i < count; i += simd::kLanes<T>) {
    const auto x = simd::load_up_to(from + i, count - i);
    simd::store_up_to(to + i, function(x), count - i);
  }
}

template <class T>
void load_partial(const T* from, int count, const simd::Compute<T>* fill,
                  simd::Compute<T>* to) {
  simd::store(to, fill == nullptr ? simd::load_partial(from, count)
                                  : simd::load_partial(from, count, *fill));
}

// The register as it was loaded, and its lanes as they are stored.
template <class T>
void copy_up_to(const T* from, int64_t left, simd::Compute<T>* loaded, T* to) {
  const auto value = simd::load_up_to(from, left);
  simd::store(loaded, value);
  simd::store_up_to(to, value + 1, left);
}

// Two registers one behind the other.
template <class T>
void interleave(const T* from, T* to) {
  auto first = simd::load(from);
  auto second = simd::load(from + simd::kLanes<T>);
  simd::interleave(first, second);
  simd::store(to, first);
  simd::store(to + simd::kLanes<T>, second);
}

}  // namespace

#define PKG_FUNCTION(name)                                        \
  extern "C" void name##_float32(const float* from, float* to,    \
                                 int64_t count) {                 \
    apply(from, to, count, [](auto x) { return math::name(x); }); \
  }                                                               \
  extern "C" void name##_float64(const double* from, double* to,  \
                                 int64_t count) {                 \
    apply(from, to, count, [](auto x) { return math::name(x); }); \
  }

PKG_FUNCTION(abs)
PKG_FUNCTION(exp)
PKG_FUNCTION(expm1_of_nonpositive)
PKG_FUNCTION(log)
PKG_FUNCTION(sigmoid)
PKG_FUNCTION(sqrt)
PKG_FUNCTION(tanh)

#define PKG_LOADS(dtype, T)                                             \
  extern "C" void load_partial_##dtype(const T* from, int count,        \
                                       const simd::Compute<T>* fill,    \
                                       simd::Compute<T>* to) {          \
    load_partial(from, count, fill, to);                                \
  }                                                                     \
  extern "C" void copy_up_to_##dtype(const T* from, int64_t left,       \
                                     simd::Compute<T>* loaded, T* to) { \
    copy_up_to(from, left, loaded, to);                                 \
  }

PKG_LOADS(float32, float)
PKG_LOADS(float64, double)
PKG_LOADS(float16, Half)
PKG_LOADS(bfloat16, BFloat16)
PKG_LOADS(int32, int32_t)

#define PKG_SHUFFLES(dtype, T)                                    \
  extern "C" void interleave_##dtype(const T* from, T* to) {      \
    interleave(from, to);                                         \
  }                                                               \
  extern "C" void swap_neighbours_##dtype(const T* from, T* to) { \
    simd::store(to, simd::swap_neighbours(simd::load(from)));     \
  }

PKG_SHUFFLES(float32, float)
PKG_SHUFFLES(float64, double)

extern "C" float reduce_max_or_nan_float32(const float* from) {
  return simd::reduce_max_or_nan(simd::load(from));
}
extern "C" double reduce_max_or_nan_float64(const double* from) {
  return simd::reduce_max_or_nan(simd::load(from));
}
extern "C" int vector_bytes() { return simd::kVectorBytes; }
