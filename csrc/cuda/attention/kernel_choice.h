// What the choice of a kernel of attention depends on beside the call.
#pragma once

#include <cstdint>

namespace pkg::cuda {

struct AttentionDevice {
  int most_shared_bytes;  // of a block
  int multiprocessors;
  bool has_warpgroup_products;
  bool joins_gradients = false;  // of query, key and value, in one kernel
  bool copies_panels = false;    // of float32, asynchronously, for large tiles
};

// Calls function.operator()<width>() with the width of the tiles for heads of
// that size: 128 columns where 64 would have several blocks repeat the scores,
// if the registers of a thread hold so many.
template <class Element, class Function>
void with_attention_width(int64_t head_size, Function&& function) {
  if constexpr (sizeof(Element) <= sizeof(float)) {
    if (head_size > 64) {
      return function.template operator()<128>();
    }
  }
  function.template operator()<64>();
}

}  // namespace pkg::cuda
