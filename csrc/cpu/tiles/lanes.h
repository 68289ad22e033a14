// Masks of the lanes that exist.
#pragma once

#include <cstdint>

namespace pkg::cpu::tiles {

// The first `count` of up to 64 lanes; none where it is negative.
inline uint64_t first_lanes(int64_t count) {
  return count <= 0    ? 0
         : count >= 64 ? ~uint64_t{0}
                       : (uint64_t{1} << count) - 1;
}

}  // namespace pkg::cpu::tiles
