#include "emulated_bulk_copy.h"

#include <map>
#include <memory>
#include <vector>

#include "asynchronous.h"
#include "clocks.h"
#include "emulator_state.h"

namespace pkg::emulation {
namespace {

constexpr size_t kVectorBytes = 16;

// On its way to global memory: what it does next is in a queue of its own.
struct BulkStore {
  int queue;
  float* to;
  size_t bytes;
  bool is_committed = false;
  bool is_read = false;
};

struct OfBlock {
  std::map<int, std::vector<BulkStore>> of_threads;
  int queues = kFirstBulkQueue;
};

OfBlock of_blocks[kBlocksAtATime];

OfBlock& stores() { return of_blocks[block->slot]; }

void write_numbers(const std::vector<float>& numbers, float* to, bool adds) {
  std::vector<float> result(numbers.size());
  const size_t bytes = numbers.size() * sizeof(float);
  if (adds) {
    std::memcpy(result.data(), to, bytes);
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    result[i] = adds ? result[i] + numbers[i] : numbers[i];
  }
  std::memcpy(to, result.data(), bytes);
}

// What the thread has committed, as far as it has been read or has arrived.
void finish_reads() {
  for (BulkStore& store : stores().of_threads[running]) {
    if (store.is_committed && !store.is_read) {
      run_operations_of(store.queue, 1);
      finish_reading_of(store.queue);
      store.is_read = true;
    }
  }
}

}  // namespace

void check_bulk_copy(size_t first_byte, const void* global, size_t bytes,
                     Site site) {
  if (first_byte % kVectorBytes != 0 || bytes % kVectorBytes != 0 ||
      reinterpret_cast<uintptr_t>(global) % kVectorBytes != 0) {
    report(
        "thread %d copies %zu bytes between byte %zu of shared memory and %p, "
        "which is not aligned, at %s:%u",
        running, bytes, first_byte, global, site.file_name(), site.line());
  }
}

void note_bulk_access(const void* global, size_t bytes, bool writes) {
  const auto* const first = static_cast<const std::byte*>(global);
  for (size_t byte = 0; byte < bytes; byte += kVectorBytes) {
    check_copy_in_turn(first + byte, writes);
  }
}

void begin_bulk_store(const SharedStorage& storage, size_t first_byte,
                      float* to, size_t bytes, bool adds, Site site) {
  start_clocks();
  check_bulk_copy(first_byte, to, bytes, site);
  const size_t first = first_byte / storage.element_size;
  const size_t end = (first_byte + bytes) / storage.element_size;
  if (end > storage.count) {
    report_index(storage, static_cast<int64_t>(end), storage.count);
  }
  for (size_t i = first; i < end; ++i) {
    check_product_read(storage, i, running, "a bulk copy");
  }
  note_bulk_access(to, bytes, true);
  const int queue = stores().queues++;
  add_reading({.storage = &storage,
               .begin = first_byte,
               .end = first_byte + bytes,
               .warpgroup = kNoWarpgroup,
               .thread = running,
               .group = static_cast<uint64_t>(queue),
               .time = block->now,
               .clocks = {}});
  stores().of_threads[running].push_back({queue, to, bytes});
  const auto numbers =
      std::make_shared<std::vector<float>>(bytes / sizeof(float));
  add_operation(queue, [=, &storage] {
    std::memcpy(numbers->data(), storage.bytes + first_byte, bytes);
  });
  add_operation(queue, [=] { write_numbers(*numbers, to, adds); });
}

void commit_bulk_copies() {
  for (BulkStore& store : stores().of_threads[running]) {
    store.is_committed = true;
  }
}

void wait_for_bulk_reads() {
  start_clocks();
  finish_reads();
  advance_clock(running);
}

void wait_for_bulk_copies() {
  wait_for_bulk_reads();
  auto& own = stores().of_threads[running];
  std::erase_if(own, [](const BulkStore& store) {
    if (!store.is_committed) {
      return false;
    }
    run_operations_of(store.queue, 0);
    for (size_t i = 0; i < store.bytes / sizeof(float); i += 4) {
      note_arrival_in_turn(store.to + i);
    }
    return true;
  });
}

void forget_bulk_copies() { stores() = {}; }

void check_bulk_copies_are_read() {
  for (const BulkStore& store : stores().of_threads[running]) {
    if (!store.is_read) {
      report(
          "thread %d returns and has not waited until its bulk copies have "
          "been read",
          running);
    }
  }
}

}  // namespace pkg::emulation
