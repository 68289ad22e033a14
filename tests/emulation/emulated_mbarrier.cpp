#include "emulated_mbarrier.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "asynchronous.h"
#include "clocks.h"
#include "emulated_tensor_map.h"
#include "emulator_state.h"

namespace pkg::emulation {

struct Mbarrier {
  const char* name;
  int index;
  int slot;  // of its copies among the clocks
  int arrivals = 0;
  int missing_arrivals = 0;
  int64_t missing_bytes = 0;
  uint64_t phase = 0;
  int maker = -1;  // the thread that has made it
  uint32_t made = 0;
  bool is_published = false;
  Clocks arrived{};    // what those knew that have arrived
  Clocks completed{};  // what is known after the phases that are over
};

namespace {

struct OfBlock {
  std::map<const char*, std::deque<Mbarrier>> declared;
  std::map<int, const Mbarrier*> waited_for;  // by thread
};

OfBlock of_blocks[kBlocksAtATime];

OfBlock& mbarriers() { return of_blocks[block->slot]; }

void complete_if_nothing_is_missing(Mbarrier& barrier) {
  if (barrier.missing_arrivals != 0 || barrier.missing_bytes != 0) {
    return;
  }
  join(barrier.completed, barrier.arrived);
  ++barrier.phase;
  barrier.missing_arrivals = barrier.arrivals;
  for (const auto& [thread, waiting] : mbarriers().waited_for) {
    if (waiting == &barrier &&
        block->threads[thread]->state == State::in_mbarrier) {
      block->threads[thread]->state = State::ready;
    }
  }
}

// The barrier, for a thread that must know that it has been made.
Mbarrier& made(Mbarrier& barrier, Site site) {
  if (barrier.maker < 0) {
    report("thread %d uses mbarrier %s[%d], which nobody has made, at %s:%u",
           running, barrier.name, barrier.index, site.file_name(), site.line());
  }
  if (barrier.maker != running && barrier.made > block->last_block_barrier) {
    report(
        "thread %d uses mbarrier %s[%d], which thread %d has made without a "
        "barrier of the block after it, at %s:%u",
        running, barrier.name, barrier.index, barrier.maker, site.file_name(),
        site.line());
  }
  if (!barrier.is_published) {
    report(
        "thread %d uses mbarrier %s[%d], which was made and not published, at "
        "%s:%u",
        running, barrier.name, barrier.index, site.file_name(), site.line());
  }
  return barrier;
}

void arrive_at(Mbarrier& barrier, int64_t bytes, Site site) {
  made(barrier, site);
  if (barrier.missing_arrivals == 0) {
    report(
        "thread %d arrives at mbarrier %s[%d] at %s:%u, where all %d of the "
        "phase have arrived",
        running, barrier.name, barrier.index, site.file_name(), site.line(),
        barrier.arrivals);
  }
  join(barrier.arrived, block->threads[running]->clocks);
  advance_clock(running);
  barrier.missing_bytes += bytes;
  --barrier.missing_arrivals;
  complete_if_nothing_is_missing(barrier);
}

}  // namespace

Mbarrier& Mbarriers::at(int index) const {
  if (index < 0 || static_cast<size_t>(index) >= barriers_->size()) {
    report("thread %d uses mbarrier %s[%d] of %zu", running,
           barriers_->front().name, index, barriers_->size());
  }
  return (*barriers_)[static_cast<size_t>(index)];
}

void Mbarriers::init(int index, int arrivals) const {
  Mbarrier& barrier = at(index);
  if (barrier.maker >= 0) {
    report("thread %d makes mbarrier %s[%d], which thread %d has made", running,
           barrier.name, index, barrier.maker);
  }
  barrier.arrivals = arrivals;
  barrier.missing_arrivals = arrivals;
  barrier.maker = running;
  barrier.made = block->now;
}

void Mbarriers::arrive(int index, Site site) const {
  arrive_at(at(index), 0, site);
}

void Mbarriers::arrive_and_expect(int index, int bytes, Site site) const {
  arrive_at(at(index), bytes, site);
}

void Mbarriers::wait(int index, uint32_t parity, Site site) const {
  Mbarrier& barrier = made(at(index), site);
  // Others may come first.
  if (order() % 4 == 0) {
    emulation::wait(State::ready, site);
  }
  while (barrier.phase % 2 == parity) {
    mbarriers().waited_for[running] = &barrier;
    emulation::wait(State::in_mbarrier, site);
  }
  mbarriers().waited_for.erase(running);
  if (!barrier.completed.empty()) {
    join(block->threads[running]->clocks, barrier.completed);
  }
}

Mbarriers declare_mbarriers(const char* declaration, const char* name,
                            int count) {
  start_clocks();
  std::deque<Mbarrier>& barriers = mbarriers().declared[declaration];
  if (barriers.empty()) {
    int slot = static_cast<int>(block->thread_count);
    for (const auto& [other, existing] : mbarriers().declared) {
      slot += static_cast<int>(existing.size());
    }
    if (slot + count > static_cast<int>(block->thread_count) + kMostMbarriers) {
      report("more than %d mbarriers", kMostMbarriers);
    }
    for (int index = 0; index < count; ++index) {
      barriers.push_back({.name = name, .index = index, .slot = slot + index});
    }
  }
  return Mbarriers(barriers);
}

void forget_mbarriers() { mbarriers() = {}; }

void publish_mbarriers() {
  for (auto& [declaration, barriers] : mbarriers().declared) {
    for (Mbarrier& barrier : barriers) {
      barrier.is_published = barrier.is_published || barrier.maker == running;
    }
  }
  publish_shared_memory();
}

void publish_shared_memory() {
  start_clocks();
  advance_clock(running);
  block->threads[running]->published = own_clock();
}

void begin_bulk_copy(const SharedStorage& storage, size_t first_byte,
                     size_t bytes, Mbarrier& barrier,
                     std::function<void(std::byte*)> land, Site site) {
  made(barrier, site);
  check_not_read(storage, first_byte, first_byte + bytes);
  const size_t first = first_byte / storage.element_size;
  const size_t end = (first_byte + bytes) / storage.element_size;
  if (end > storage.count) {
    report_index(storage, static_cast<int64_t>(end), storage.count);
  }
  const uint64_t phase = barrier.phase;
  for (size_t i = first; i < end; ++i) {
    check_access(storage, i, Access::write);
    AccessRecord& record = storage.records[i];
    record.in_flight = true;
    record.writer = static_cast<int16_t>(barrier.slot);
    record.write_clock = static_cast<uint32_t>(phase + 1);
  }
  std::fill_n(storage.bytes + first_byte, bytes, std::byte{0xff});
  add_operation(kNoQueue, [=, &storage, &barrier, land = std::move(land)] {
    if (barrier.phase != phase) {
      report(
          "a copy of %zu bytes to shared %s arrives after the phase of "
          "mbarrier "
          "%s[%d] in which it was begun, which did not expect as many",
          bytes, storage.name, barrier.name, barrier.index);
    }
    for (size_t i = first; i < end; ++i) {
      storage.records[i].in_flight = false;
      storage.records[i].write_time = block->now;
    }
    land(storage.bytes);
    barrier.arrived.resize(block->thread_count + kMostMbarriers);
    barrier.arrived[barrier.slot] = static_cast<uint32_t>(phase + 1);
    barrier.missing_bytes -= static_cast<int64_t>(bytes);
    complete_if_nothing_is_missing(barrier);
  });
}

void check_box(const TensorMap& map, size_t element_size, size_t first_byte,
               Site site) {
  if (map.element_size != element_size) {
    report("thread %d copies elements of %zu bytes by a map of %zu, at %s:%u",
           running, element_size, map.element_size, site.file_name(),
           site.line());
  }
  if (first_byte % (8 * kBoxLineBytes) != 0) {
    report("thread %d copies a box to byte %zu, which is not aligned, at %s:%u",
           running, first_byte, site.file_name(), site.line());
  }
}

void report_waiting_threads() {
  for (size_t i = 0; i < block->thread_count; ++i) {
    const Thread& thread = *block->threads[i];
    if (thread.state == State::in_mbarrier) {
      const Mbarrier& barrier = *mbarriers().waited_for[static_cast<int>(i)];
      report(
          "deadlock: thread %zu waits at %s:%u for phase %llu of mbarrier "
          "%s[%d], in which %d arrivals and %lld bytes are missing",
          i, thread.site.file_name(), thread.site.line(),
          static_cast<unsigned long long>(barrier.phase), barrier.name,
          barrier.index, barrier.missing_arrivals,
          static_cast<long long>(barrier.missing_bytes));
    }
    if (thread.state == State::in_warpgroup) {
      report("divergent: thread %zu waits for its warpgroup at %s:%u", i,
             thread.site.file_name(), thread.site.line());
    }
  }
}

}  // namespace pkg::emulation
