#include "cpu/residues/choice.h"

#include <cstdint>

#include "host/compiler.h"

// For pkg/_float64_matmul.py, by ctypes. Every CPU library has it; one without
// tile registers multiplies and adds whatever is chosen.
extern "C" PKG_EXPORT void pkg_choose_float64_residues(int64_t chosen) {
  pkg::cpu::residues::are_chosen().store(chosen != 0,
                                         std::memory_order_relaxed);
}
