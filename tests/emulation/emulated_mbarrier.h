// mbarriers as csrc/cuda/device/mbarrier.cuh has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

#include "cuda_emulator.h"

#define PKG_MBARRIERS(name, count)          \
  static const char name##_declaration = 0; \
  const ::pkg::emulation::Mbarriers name =  \
      ::pkg::emulation::declare_mbarriers(&name##_declaration, #name, count)

namespace pkg::emulation {

struct Mbarrier;

class Mbarriers {
 public:
  explicit Mbarriers(std::deque<Mbarrier>& barriers) : barriers_(&barriers) {}

  void init(int index, int arrivals) const;
  void arrive(int index, Site site = Site::current()) const;
  void arrive_and_expect(int index, int bytes,
                         Site site = Site::current()) const;
  void wait(int index, uint32_t parity, Site site = Site::current()) const;

  Mbarrier& at(int index) const;

 private:
  std::deque<Mbarrier>* barriers_;
};

// Those of a declaration in the running block, the same for all its threads.
Mbarriers declare_mbarriers(const char* declaration, const char* name,
                            int count);
void forget_mbarriers();
void publish_mbarriers();
void publish_shared_memory();

// Begins a copy that counts for the barrier: `land` puts the bytes into shared
// memory, any time from now on.
void begin_bulk_copy(const SharedStorage& storage, size_t first_byte,
                     size_t bytes, Mbarrier& barrier,
                     std::function<void(std::byte*)> land, Site site);

// Says which threads wait in vain, if there are any.
void report_waiting_threads();

}  // namespace pkg::emulation
