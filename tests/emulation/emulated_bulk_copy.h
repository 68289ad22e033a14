// Copies of numbers as csrc/cuda/device/bulk_copy.cuh has them.
//
// One to global memory reads shared memory at any time until its thread has
// waited for that, and writes at any time until it has waited for all. Reported
// are, beside what emulated_turns.h says of the numbers' order:
//
//   - one that reads what was written and not published to it, or what its
//     thread does not know of,
//   - a write to where one reads, before its thread is known to have waited,
//   - a thread that returns before its copies have been read.
#pragma once

#include <cstddef>
#include <cstring>

#include "cuda_emulator.h"
#include "emulated_mbarrier.h"
#include "emulated_turns.h"
#include "shared_span.h"

namespace pkg::emulation {

// That addresses and size are multiples of sixteen bytes.
void check_bulk_copy(size_t first_byte, const void* global, size_t bytes,
                     Site site);
// Notes the access of a copy of the running thread to numbers in global memory.
void note_bulk_access(const void* global, size_t bytes, bool writes);
void begin_bulk_store(const SharedStorage& storage, size_t first_byte,
                      float* to, size_t bytes, bool adds, Site site);
void commit_bulk_copies();
void wait_for_bulk_reads();
void wait_for_bulk_copies();

template <class Element>
void copy_numbers_in_turn(const SharedSpan<Element>& to, int index,
                          const float* from, int bytes,
                          const Mbarriers& barriers, int barrier,
                          Site site = Site::current()) {
  const size_t first_byte = to.byte(index);
  const auto size = static_cast<size_t>(bytes);
  check_bulk_copy(first_byte, from, size, site);
  note_bulk_access(from, size, false);
  begin_bulk_copy(
      to.storage(), first_byte, size, barriers.at(barrier),
      [=](std::byte* memory) { std::memcpy(memory + first_byte, from, size); },
      site);
}

template <class Element>
void store_numbers_in_turn(const SharedSpan<Element>& from, int index,
                           float* to, int bytes, Site site = Site::current()) {
  begin_bulk_store(from.storage(), from.byte(index), to,
                   static_cast<size_t>(bytes), false, site);
}

template <class Element>
void add_numbers_in_turn(const SharedSpan<Element>& from, int index, float* to,
                         int bytes, Site site = Site::current()) {
  begin_bulk_store(from.storage(), from.byte(index), to,
                   static_cast<size_t>(bytes), true, site);
}

void forget_bulk_copies();
// That those of the running thread, which returns, have been read.
void check_bulk_copies_are_read();

}  // namespace pkg::emulation
