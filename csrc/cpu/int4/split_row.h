// A row of rowwise_scaled_linear, divided into its even and its odd columns.
#pragma once

#include <cstdint>

#include "rowwise_scaled_linear.h"

namespace pkg::cpu {

// Even and odd columns of `pairs` pairs.
inline void split_row(const int8_t* from, int64_t stride, RowValues values,
                      int64_t pairs, int8_t* even, int8_t* odd) {
  if (values == RowValues::Int4) {
    for (int64_t i = 0; i < pairs; ++i) {
      const int8_t both = from[i * stride];
      even[i] = static_cast<int8_t>(static_cast<int8_t>(both << 4) >> 4);
      odd[i] = static_cast<int8_t>(both >> 4);
    }
  } else if (stride == 1) {
    for (int64_t i = 0; i < pairs; ++i) {
      even[i] = from[2 * i];
      odd[i] = from[2 * i + 1];
    }
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      even[i] = from[2 * i * stride];
      odd[i] = from[(2 * i + 1) * stride];
    }
  }
}

}  // namespace pkg::cpu
