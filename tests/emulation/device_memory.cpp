#include "device_memory.h"

#include <signal.h>
#include <sys/mman.h>

#include <vector>

namespace pkg::emulation {
namespace {

struct Pages {
  std::byte* begin;
  size_t size;
};

std::vector<Pages> of_device;
int64_t accesses = 0;
struct sigaction before;

void allow(bool is_allowed) {
  for (const Pages& pages : of_device) {
    mprotect(pages.begin, pages.size,
             is_allowed ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

// The instruction is made again, and succeeds.
void count_access(int, siginfo_t* fault, void*) {
  const auto* const address = static_cast<const std::byte*>(fault->si_addr);
  for (const Pages& pages : of_device) {
    if (address >= pages.begin && address < pages.begin + pages.size) {
      ++accesses;
      mprotect(pages.begin, pages.size, PROT_READ | PROT_WRITE);
      return;
    }
  }
  sigaction(SIGSEGV, &before, nullptr);
}

}  // namespace

void give_to_device(void* begin, size_t size) {
  if (of_device.empty()) {
    struct sigaction action = {};
    action.sa_sigaction = &count_access;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before);
  }
  of_device.push_back({static_cast<std::byte*>(begin), size});
  mprotect(begin, size, PROT_NONE);
}

void take_from_device() {
  if (!of_device.empty()) {
    allow(true);
    of_device.clear();
    sigaction(SIGSEGV, &before, nullptr);
  }
}

int64_t host_accesses() { return accesses; }

KernelAccess::KernelAccess() { allow(true); }

KernelAccess::~KernelAccess() { allow(false); }

}  // namespace pkg::emulation
