// Whether products of float64 may be made by residues, as the user chose:
// pkg.set_float64_matmul and PKG_FLOAT64_MATMUL, which pkg/_float64_matmul.py
// brings here.
#pragma once

#include <atomic>

namespace pkg::cpu::residues {

inline std::atomic<bool>& are_chosen() {
  static std::atomic<bool> chosen{true};
  return chosen;
}

}  // namespace pkg::cpu::residues
