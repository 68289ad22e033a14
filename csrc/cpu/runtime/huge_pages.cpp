#include "cpu/runtime/huge_pages.h"

#include "host/integer_math.h"

#if defined(__linux__)

#include <sys/mman.h>

#include <fstream>
#include <string>

namespace pkg::cpu {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Of Linux 6.1; older ones refuse it, and move pages by and by.
constexpr int kCollapse = 25;

// By /sys, which kCollapse does not ask.
bool are_allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string setting;
  return std::getline(file, setting) &&
         setting.find("[never]") == std::string::npos;
}

void advise(void* data, int64_t bytes, int advice) {
  static const bool kAreAllowed = are_allowed();
  const auto from = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = round_up(from, kHugePage);
  const uintptr_t end =
      (from + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (kAreAllowed && begin < end) {
    static_cast<void>(
        madvise(reinterpret_cast<void*>(begin), end - begin, advice));
  }
}

}  // namespace

void prefer_huge_pages(void* data, int64_t bytes) {
  advise(data, bytes, MADV_HUGEPAGE);
}

void move_to_huge_pages(void* data, int64_t bytes) {
  advise(data, bytes, kCollapse);
}

}  // namespace pkg::cpu

#else

namespace pkg::cpu {

void prefer_huge_pages(void* /*data*/, int64_t /*bytes*/) {}

void move_to_huge_pages(void* /*data*/, int64_t /*bytes*/) {}

}  // namespace pkg::cpu

#endif
