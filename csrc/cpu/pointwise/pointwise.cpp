// The conversions of cpu/pointwise/pointwise.h: runs of any element type to and
// from contiguous runs of another.
#include "cpu/pointwise/pointwise.h"

namespace pkg::cpu {

template <class T>
void gather_run(const Source& source, int64_t offset, int64_t stride,
                int64_t count, T* to) {
  with_element_type(source.type, [&](auto example) {
    using From = decltype(example);
    const From* from = reinterpret_cast<const From*>(source.data) + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = convert<T>(element_at(from, i));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = convert<T>(element_at(from, i * stride));
      }
    }
  });
}

template <class T>
void scatter_run(const Destination& destination, int64_t offset, int64_t stride,
                 int64_t count, const T* from) {
  with_element_type(destination.type, [&](auto example) {
    using To = decltype(example);
    To* to = reinterpret_cast<To*>(destination.data) + offset;
    for (int64_t i = 0; i < count; ++i) {
      to[i * stride] = convert<To>(from[i]);
    }
  });
}

#define PKG_CONVERT_RUNS(T)                                                \
  template void gather_run(const Source&, int64_t, int64_t, int64_t, T*);  \
  template void scatter_run(const Destination&, int64_t, int64_t, int64_t, \
                            const T*)
PKG_CONVERT_RUNS(bool);
PKG_CONVERT_RUNS(uint8_t);
PKG_CONVERT_RUNS(int8_t);
PKG_CONVERT_RUNS(int16_t);
PKG_CONVERT_RUNS(int32_t);
PKG_CONVERT_RUNS(int64_t);
PKG_CONVERT_RUNS(Half);
PKG_CONVERT_RUNS(BFloat16);
PKG_CONVERT_RUNS(float);
PKG_CONVERT_RUNS(double);

}  // namespace pkg::cpu
