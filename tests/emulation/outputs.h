// That of what a launch computes each element is written once, by one block.
#pragma once

#include <cstddef>

namespace pkg::emulation {

// A launch begins: nobody has written anything.
void begin_to_watch();
// What the block that has its turn has changed, is its own.
void note_changes();
// The running thread stores so many bytes: to an output once in a launch. Of
// kernels that are compiled so that they announce it (counters.cpp).
void note_store(const void* address, size_t size);

}  // namespace pkg::emulation
