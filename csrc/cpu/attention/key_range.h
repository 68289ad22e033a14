// Ranges of keys, as masks and causality leave them to be computed.
#pragma once

#include <cstdint>

namespace pkg::cpu::attention {

// Of some keys, those from `begin` until `end`.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

}  // namespace pkg::cpu::attention
