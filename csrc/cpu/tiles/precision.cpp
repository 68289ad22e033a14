#include "cpu/tiles/precision.h"

#include "cpu/tiles/micro_kernel.h"
#include "host/compiler.h"

namespace {

using pkg::cpu::tiles::chosen_float32_products;
using pkg::cpu::tiles::Float32Products;

}  // namespace

// For pkg/_float32_matmul.py, by ctypes. Every CPU library has them; one
// without tile registers multiplies and adds whatever is chosen.
extern "C" PKG_EXPORT void pkg_choose_float32_products(int64_t count) {
  chosen_float32_products().store(static_cast<Float32Products>(count),
                                  std::memory_order_relaxed);
}

extern "C" PKG_EXPORT int pkg_has_tiles() {
#if defined(PKG_HAS_TILES)
  return 1;
#else
  return 0;
#endif
}
