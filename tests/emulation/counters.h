// What the emulated instructions cost of shared and of global memory.
#pragma once

#include "emulator_state.h"

namespace pkg::emulation {

// Of the block that has its turn, whose threads have all arrived somewhere.
void count_accesses();
// Of a warp of it, whose lanes have.
void count_accesses(int warp);
// Of a block that has ended.
void count_copies();

}  // namespace pkg::emulation
