// The scheduler of the emulated threads, and the checks of their accesses.
// Compiled without sanitizers: it is the checker, and it is called for every
// access to shared memory.
#include "cuda_emulator.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "asynchronous.h"
#include "clocks.h"
#include "counters.h"
#include "emulated_bulk_copy.h"
#include "emulated_mbarrier.h"
#include "emulated_tensor_map.h"
#include "emulated_wgmma.h"
#include "emulator_state.h"
#include "fiber.h"
#include "outputs.h"
#include "waiting_blocks.h"

namespace pkg::emulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMostThreads = 1024;
// What a kernel may declare, and what it and its launch have together unless
// the host has asked for more.
constexpr size_t kGrantedSharedBytes = 48 * 1024;

Fiber scheduler;
Block blocks[kBlocksAtATime] = {Block(0), Block(1), Block(2)};
size_t dynamic_bytes = 0;
size_t most_shared_bytes = 227 * 1024;  // of compute capability 9.0
size_t launched_shared_bytes = 0;       // the most of the running launch
bool bounds_are_stated = false;
size_t launched_threads = 0;
size_t waited_threads = 0;  // for the kernel before
Schedule schedule = Schedule::by_chance;
std::string pending_report;
const std::function<void()>* running_kernel = nullptr;

}  // namespace

Block* block = &blocks[0];
int running = kScheduler;
std::mt19937_64 order{0};

Thread::Thread() : fiber(kStackBytes) {}

void report(const char* format, ...) {
  char words[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(words, sizeof(words), format, arguments);
  va_end(arguments);
  char place[64];
  std::snprintf(place, sizeof(place), " [block (%u, %u, %u)]", blockIdx.x,
                blockIdx.y, blockIdx.z);
  const std::string message = std::string("cuda emulator: ") + words + place;
  if (running == kScheduler) {
    throw Report(message);
  }
  pending_report = message;
  scheduler.switch_from(block->threads[running]->fiber);
  std::abort();
}

void wait(State state, Site site) {
  Thread& thread = *block->threads[running];
  thread.state = state;
  thread.site = site;
  scheduler.switch_from(thread.fiber);
}

namespace {

// The numbers below that, in the order in which they have their turns.
std::vector<size_t> scheduled(size_t count) {
  std::vector<size_t> indices(count);
  std::iota(indices.begin(), indices.end(), size_t{0});
  if (schedule == Schedule::by_chance) {
    std::shuffle(indices.begin(), indices.end(), order);
  } else if (schedule == Schedule::backwards) {
    std::reverse(indices.begin(), indices.end());
  }
  return indices;
}

void run_threads_for_ever() {
  Fiber::entered();
  while (true) {
    (*running_kernel)();
    Thread& thread = *block->threads[running];
    if (thread.copies.size() > 1 || !thread.copies.front().empty()) {
      report("thread %d returns and has not waited for its asynchronous copies",
             running);
    }
    check_products_are_over();
    check_bulk_copies_are_read();
    thread.state = State::finished;
    scheduler.switch_from(thread.fiber);
  }
}

void resume(size_t index) {
  running = static_cast<int>(index);
  threadIdx = block->threads[index]->index;
  block->threads[index]->fiber.switch_from(scheduler);
  running = kScheduler;
  if (!pending_report.empty()) {
    throw Report(std::exchange(pending_report, {}));
  }
}

// After a report: the stacks of the threads are in the middle of the kernel.
void abandon_threads() {
  for (Block& each : blocks) {
    for (auto& thread : each.threads) {
      thread.release();
    }
    each.threads.clear();
    each.is_running = false;
  }
}

void finish_block_barrier() {
  const Thread* first = nullptr;
  for (size_t i = 0; i < block->thread_count; ++i) {
    const Thread& thread = *block->threads[i];
    if (thread.state == State::in_block_barrier && first == nullptr) {
      first = &thread;
    }
  }
  for (size_t i = 0; i < block->thread_count; ++i) {
    const Thread& thread = *block->threads[i];
    if (thread.state == State::finished) {
      report(
          "thread %zu has returned, but thread %u waits in the barrier of "
          "%s:%u for it",
          i, first->index.x, first->site.file_name(), first->site.line());
    }
    if (thread.state == State::in_mbarrier ||
        thread.state == State::in_warpgroup) {
      report_waiting_threads();
    }
    if (thread.state == State::in_warp_exchange) {
      report(
          "divergent: thread %zu waits for lanes of its warp at %s:%u, while "
          "thread %u waits in the barrier of line %u",
          i, thread.site.file_name(), thread.site.line(), first->index.x,
          first->site.line());
    }
    if (thread.site.line() != first->site.line()) {
      report(
          "divergent barrier: thread %zu waits at %s:%u, thread %u at line "
          "%u",
          i, thread.site.file_name(), thread.site.line(), first->index.x,
          first->site.line());
    }
  }
  for (size_t i = 0; i < block->thread_count; ++i) {
    block->threads[i]->state = State::ready;
  }
  block->last_block_barrier = block->now++;
  count_accesses();
}

// Nobody can go on: either a barrier of the whole block is complete, or the
// block waits for another one, or has ended, or it never will.
bool next_phase() {
  if (some_wait_for_blocks()) {
    return true;
  }
  size_t in_barrier = 0;
  const Thread* in_exchange = nullptr;
  for (size_t i = 0; i < block->thread_count; ++i) {
    in_barrier += block->threads[i]->state == State::in_block_barrier;
    if (block->threads[i]->state == State::in_warp_exchange) {
      in_exchange = block->threads[i].get();
    }
  }
  if (in_barrier > 0) {
    finish_block_barrier();
    return true;
  }
  report_waiting_threads();
  if (in_exchange != nullptr) {
    report("thread %u waits for lanes of its warp at %s:%u that have returned",
           in_exchange->index.x, in_exchange->site.file_name(),
           in_exchange->site.line());
  }
  return false;
}

// The block of the grid that has this number takes the place of one that has
// ended.
void begin_block(unsigned linear) {
  const dim3 size = blockDim;
  block->linear = linear;
  block->index = {linear % gridDim.x, linear / gridDim.x % gridDim.y,
                  linear / gridDim.x / gridDim.y};
  block->thread_count = static_cast<size_t>(size.x) * size.y * size.z;
  auto& threads = block->threads;
  while (threads.size() < block->thread_count) {
    threads.push_back(std::make_unique<Thread>());
    threads.back()->fiber.prepare(&run_threads_for_ever);
  }
  for (size_t i = 0; i < block->thread_count; ++i) {
    const auto place = static_cast<unsigned>(i);
    threads[i]->copies.assign(1, {});
    threads[i]->clocks.clear();
    threads[i]->activations.clear();
    threads[i]->published = 0;
    threads[i]->state = State::ready;
    threads[i]->index = {place % size.x, place / size.x % size.y,
                         place / size.x / size.y};
  }
  block->threads_in_order = scheduled(block->thread_count);
  block->warps.assign((block->thread_count + kWarpSize - 1) / kWarpSize,
                      Warp());
  block->now = 1;
  block->last_block_barrier = 0;
  block->readers.clear();
  block->is_running = true;
  block->is_stuck = false;
  forget_waits();
  forget_operations();
  forget_mbarriers();
  forget_products();
  forget_bulk_copies();
  for (auto& [declaration, array] : block->arrays) {
    std::fill(array.owned_bytes.begin(), array.owned_bytes.end(),
              std::byte{0xff});
    std::fill(array.owned_records.begin(), array.owned_records.end(),
              AccessRecord());
  }
}

// A block must not end before what it has begun.
void check_somebody_waits() {
  for (size_t i = 0; i < block->thread_count; ++i) {
    if (block->threads[i]->state != State::finished) {
      return;
    }
  }
  report(
      "all threads have returned, and a copy to shared memory is on its way "
      "that nobody has waited for");
}

// Where threads do not wait for the whole block, chance ends its turn.
bool leaves_by_chance() {
  return schedule == Schedule::by_chance && order() % 64 == 0;
}

// The turn of a block: until its threads wait for each other, or have returned.
void run_turn() {
  blockIdx = block->index;
  wake_those_in_turn();
  block->is_stuck = true;
  bool progress = true;
  while (progress) {
    progress = false;
    for (const size_t i : block->threads_in_order) {
      if (block->threads[i]->state == State::ready) {
        resume(i);
        progress = true;
        run_some_operations();
      }
    }
    if (!progress && has_operations()) {
      check_somebody_waits();
      run_operation();
      progress = true;
    }
    block->is_stuck = block->is_stuck && !progress;
    if (progress && have_clocks() && leaves_by_chance()) {
      return;
    }
  }
  block->is_running = next_phase();
}

SharedArray& add_array(const char* declaration, const char* name,
                       size_t element_size, size_t count) {
  SharedArray& array = block->arrays[declaration];
  array.name = name;
  array.element_size = element_size;
  array.count = count;
  array.owned_bytes.assign(element_size * count, std::byte{0xff});
  array.owned_records.assign(count, AccessRecord());
  array.bytes = array.owned_bytes.data();
  array.records = array.owned_records.data();
  size_t total = 0;
  for (const auto& [other, existing] : block->arrays) {
    total += other == nullptr ? 0 : existing.owned_bytes.size();
  }
  if (total > kGrantedSharedBytes) {
    report("%zu bytes of static shared memory; a kernel may declare %zu", total,
           kGrantedSharedBytes);
  }
  if (total + dynamic_bytes > launched_shared_bytes) {
    report(
        "%zu bytes of static and %zu of dynamic shared memory; %zu together "
        "are possible",
        total, dynamic_bytes, launched_shared_bytes);
  }
  return array;
}

constexpr int16_t kSeveralWarps = -1;
int16_t several_of_warp(int warp) { return static_cast<int16_t>(-2 - warp); }

// Whether an access by `other` (a thread, a code for several, or the copies of
// an mbarrier) at `time`, and at that time of its clock, comes before anything
// that the thread does now.
bool is_ordered(int thread, uint32_t time, int16_t other, uint32_t clock) {
  if (time <= block->last_block_barrier || other == thread ||
      (other >= 0 && knows(thread, other, clock))) {
    return true;
  }
  if (other == kSeveralWarps ||
      other >= static_cast<int>(block->thread_count)) {
    return false;
  }
  const int warp = other < 0 ? -2 - other : warp_of(other);
  return warp == warp_of(thread) && time <= block->warps[warp].last_barrier;
}

// Notes of an element that several threads read when each of them did.
void note_reader(const AccessRecord& record) {
  const auto noted = block->readers.find(&record);
  if (!have_clocks() || (record.reader < 0 && noted == block->readers.end())) {
    return;
  }
  Clocks& clocks =
      noted == block->readers.end() ? block->readers[&record] : noted->second;
  clocks.resize(block->thread_count);
  if (record.reader >= 0) {
    clocks[record.reader] = record.read_clock;
  }
  clocks[running] = own_clock();
}

// Whether the reads that were noted come before anything that the thread does
// now.
bool knows_readers(int thread, const AccessRecord& record) {
  const auto noted = block->readers.find(&record);
  if (noted == block->readers.end()) {
    return false;
  }
  for (int reader = 0; reader < static_cast<int>(noted->second.size());
       ++reader) {
    const uint32_t clock = noted->second[reader];
    if (clock > 0 && reader != thread && !knows(thread, reader, clock)) {
      return false;
    }
  }
  return true;
}

[[noreturn]] void report_race(const SharedStorage& storage, size_t index,
                              const char* what, int16_t other) {
  if (other >= static_cast<int>(block->thread_count)) {
    report(
        "race on shared %s, element %zu: thread %d %s a copy whose mbarrier it "
        "has not waited for",
        storage.name, index, running, what);
  }
  if (other >= 0) {
    report(
        "race on shared %s, element %zu: thread %d %s thread %d without a "
        "barrier between them",
        storage.name, index, running, what, other);
  }
  report(
      "race on shared %s, element %zu: thread %d %s several threads without "
      "a barrier between them",
      storage.name, index, running, what);
}

}  // namespace

void check_access(const SharedStorage& storage, size_t index, Access access) {
  AccessRecord& record = storage.records[index];
  if (record.in_flight) {
    report(
        "thread %d %s shared %s, element %zu, where an asynchronous copy of "
        "thread %d has not arrived",
        running, access == Access::read ? "reads" : "writes", storage.name,
        index, record.writer);
  }
  const bool was_written = record.write_time != 0;
  if (access != Access::write && !was_written) {
    report("thread %d reads shared %s, element %zu, which nobody has written",
           running, storage.name, index);
  }
  const bool both_atomic =
      access == Access::atomic && record.written_atomically;
  if (was_written && !both_atomic &&
      !is_ordered(running, record.write_time, record.writer,
                  record.write_clock)) {
    report_race(storage, index,
                access == Access::read ? "reads what was written by"
                                       : "writes what was written by",
                record.writer);
  }
  if (access != Access::read) {
    const size_t byte = index * storage.element_size;
    check_not_read(storage, byte, byte + storage.element_size);
    if (record.read_time != 0 &&
        !is_ordered(running, record.read_time, record.reader,
                    record.read_clock) &&
        !knows_readers(running, record)) {
      report_race(storage, index, "writes what was read by", record.reader);
    }
    if (block->readers.erase(&record) > 0) {
      record.read_time = 0;  // all of the reads come before this
    }
    record.write_time = block->now;
    record.write_clock = own_clock();
    record.writer = static_cast<int16_t>(running);
    record.written_atomically = access == Access::atomic;
    return;
  }
  // Whoever comes after this read comes after those that it follows itself.
  if (is_ordered(running, record.read_time, record.reader, record.read_clock)) {
    block->readers.erase(&record);
    record.reader = static_cast<int16_t>(running);
  } else {
    note_reader(record);
    const int reader = record.reader;
    const int warp = reader == kSeveralWarps ? -1
                     : reader < 0            ? -2 - reader
                                             : warp_of(reader);
    record.reader =
        warp == warp_of(running) ? several_of_warp(warp) : kSeveralWarps;
  }
  record.read_time = block->now;
  record.read_clock = own_clock();
}

void check_product_read(const SharedStorage& storage, size_t index, int thread,
                        const char* reader) {
  const AccessRecord& record = storage.records[index];
  if (record.in_flight) {
    report("%s reads shared %s, element %zu, where a copy is on its way",
           reader, storage.name, index);
  }
  if (record.write_time == 0) {
    report("%s reads shared %s, element %zu, which nobody has written", reader,
           storage.name, index);
  }
  if (!is_ordered(thread, record.write_time, record.writer,
                  record.write_clock)) {
    report(
        "race on shared %s, element %zu: %s of thread %d reads what %s %d has "
        "written, and the thread has not waited for it",
        storage.name, index, reader, thread,
        record.writer < static_cast<int>(block->thread_count) ? "thread"
                                                              : "copy",
        record.writer);
  }
  if (record.writer < static_cast<int>(block->thread_count) &&
      block->threads[record.writer]->published <= record.write_clock) {
    report(
        "%s reads shared %s, element %zu, which thread %d has written and not "
        "published to products",
        reader, storage.name, index, record.writer);
  }
}

void check_vector_place(const SharedStorage& storage, int64_t index,
                        size_t count) {
  if (index < 0 || static_cast<size_t>(index) + count > storage.count) {
    report_index(storage, index, storage.count);
  }
  if (index % static_cast<int64_t>(count) != 0) {
    report(
        "thread %d accesses %zu neighbours of shared %s from element %lld on, "
        "which is not aligned",
        running, count, storage.name, static_cast<long long>(index));
  }
}

void check_vector(const SharedStorage& storage, int64_t index, size_t count,
                  Access access) {
  check_vector_place(storage, index, count);
  for (size_t i = 0; i < count; ++i) {
    check_access(storage, static_cast<size_t>(index) + i, access);
  }
}

void begin_copy(const SharedStorage& storage, int64_t index, size_t count,
                const void* from, size_t valid) {
  Copy copy = {&storage, static_cast<size_t>(index), count, {}};
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (address % copy.size() != 0) {
    report("thread %d copies %zu bytes from %p, which is not aligned", running,
           copy.size(), from);
  }
  check_vector(storage, index, count, Access::write);
  if (valid > 0) {
    std::memcpy(copy.bytes, from, valid);
  }
  const size_t place = copy.index * storage.element_size;
  block->warps[warp_of(running)].copies[lane_index()].push_back(
      {place, address, copy.size(), valid});
  std::fill_n(storage.bytes + place, copy.size(), std::byte{0xff});
  for (size_t i = 0; i < count; ++i) {
    storage.records[copy.index + i].in_flight = true;
  }
  block->threads[running]->copies.back().push_back(copy);
}

void commit_copies() { block->threads[running]->copies.emplace_back(); }

void wait_for_copies(size_t pending) {
  auto& groups = block->threads[running]->copies;
  while (groups.size() > pending + 1) {
    for (const Copy& copy : groups.front()) {
      std::copy_n(
          copy.bytes, copy.size(),
          copy.storage->bytes + copy.index * copy.storage->element_size);
      for (size_t i = 0; i < copy.count; ++i) {
        AccessRecord& record = copy.storage->records[copy.index + i];
        record.in_flight = false;
        record.write_time = block->now;
        record.write_clock = own_clock();
      }
    }
    groups.pop_front();
  }
}

void report_index(const SharedStorage& storage, int64_t index, size_t extent) {
  report("thread %d uses index %lld of shared %s in a dimension of %zu",
         running, static_cast<long long>(index), storage.name, extent);
}

void report_lane(int source, Site site) {
  report("thread %d shuffles from lane %d, which is not in the mask, at %s:%u",
         running, source, site.file_name(), site.line());
}

SharedStorage& shared_storage(const char* declaration, const char* name,
                              size_t element_size, size_t count) {
  const auto found = block->arrays.find(declaration);
  if (found != block->arrays.end()) {
    return found->second;
  }
  return add_array(declaration, name, element_size, count);
}

// At most one dynamic array: its declaration is null.
SharedStorage& dynamic_shared_storage(const char* name, size_t element_size) {
  return shared_storage(nullptr, name, element_size,
                        dynamic_bytes / element_size);
}

void synchronize_block(Site site) { wait(State::in_block_barrier, site); }

int lane_index() { return running % kWarpSize; }

const LaneBytes* collective(unsigned mask, const void* given, size_t given_size,
                            void* taken, size_t taken_size, Combine combine,
                            Site site) {
  const int warp_index = warp_of(running);
  const int first_thread = warp_index * kWarpSize;
  // Lanes beyond the end of the block do not exist and are not waited for.
  const size_t lanes = block->thread_count - static_cast<size_t>(first_thread);
  const unsigned existing = lanes < kWarpSize ? (1u << lanes) - 1 : ~0u;
  const int lane = lane_index();
  const unsigned own = 1u << lane;
  if ((mask & own) == 0) {
    report("thread %d is not in the mask that it passes at %s:%u", running,
           site.file_name(), site.line());
  }
  Exchange& state = block->warps[warp_index].exchanges[mask];
  if (state.arrived != 0 && state.site.line() != site.line()) {
    report("divergent: lanes of one warp exchange at %s:%u and at line %u",
           site.file_name(), site.line(), state.site.line());
  }
  state.site = site;
  state.arrived |= own;
  const uint64_t generation = state.generation % 2;
  std::copy_n(static_cast<const std::byte*>(given), given_size,
              state.given[generation][lane]);
  if (state.arrived == (mask & existing)) {
    state.arrived = 0;
    ++state.generation;
    if (mask == ~0u) {
      count_accesses(warp_index);
    }
    combine(state.given[generation], state.taken[generation]);
    for (int other = 0; other < kWarpSize; ++other) {
      if ((mask & existing) >> other & 1) {
        block->threads[first_thread + other]->state = State::ready;
      }
    }
  } else {
    wait(State::in_warp_exchange, site);
  }
  std::copy_n(state.taken[generation][lane], taken_size,
              static_cast<std::byte*>(taken));
  return state.given[generation];
}

void exchange(unsigned mask, uint64_t value, uint64_t (&values)[32],
              Site site) {
  const LaneBytes* given = collective(
      mask, &value, sizeof(value), nullptr, 0,
      [](const LaneBytes(&)[32], LaneBytes(&)[32]) {}, site);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(&values[lane], given[lane], sizeof(value));
  }
}

void synchronize_warp(unsigned mask, Site site) {
  constexpr unsigned kAll = ~0u;
  const uint64_t time = block->now;
  collective(
      mask, nullptr, 0, nullptr, 0,
      mask == kAll ? [](const LaneBytes(&)[32], LaneBytes(&)[32]) {
        if (have_clocks()) {
          join_lanes(warp_of(running));
        }
      } : [](const LaneBytes(&)[32], LaneBytes(&)[32]) {},
      site);
  // Orders memory for all lanes, once, by the first of them to go on.
  Warp& warp = block->warps[warp_of(running)];
  if (mask == kAll && warp.last_barrier < time) {
    warp.last_barrier = block->now++;
  }
}

void set_order(uint64_t seed) { order.seed(seed); }

void set_schedule(Schedule chosen) { schedule = chosen; }

void set_most_shared_bytes(size_t bytes) { most_shared_bytes = bytes; }

void check_launch_bounds(int64_t threads, int64_t) {
  bounds_are_stated = true;
  const size_t launched = block->thread_count;
  if (static_cast<int64_t>(launched) > threads) {
    report("a block of %zu threads of a kernel whose launch bounds are %lld",
           launched, static_cast<long long>(threads));
  }
}

bool have_stated_bounds() { return bounds_are_stated; }

void note_wait_for_kernel() { ++waited_threads; }

bool all_have_waited() { return waited_threads == launched_threads; }

namespace {

void check_launch(dim3 grid, dim3 threads, size_t dynamic_shared_bytes) {
  constexpr unsigned kMostAcross = 2147483647;
  constexpr unsigned kMostElse = 65535;
  const size_t count = static_cast<size_t>(threads.x) * threads.y * threads.z;
  if (count == 0 || count > kMostThreads) {
    report("a block of %zu threads; from 1 to %zu are possible", count,
           kMostThreads);
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kMostAcross ||
      grid.y > kMostElse || grid.z > kMostElse) {
    report("a grid of %u x %u x %u blocks; from 1 to %u x %u x %u are possible",
           grid.x, grid.y, grid.z, kMostAcross, kMostElse, kMostElse);
  }
  if (dynamic_shared_bytes > launched_shared_bytes) {
    report("%zu bytes of dynamic shared memory; the launch has %zu",
           dynamic_shared_bytes, launched_shared_bytes);
  }
}

// A block that had its turn in vain may go on once another has changed what it
// waits for: so nobody is stuck but where all are.
void check_for_deadlock(const std::vector<Block*>& places) {
  const auto is_stuck = [](const Block* each) { return each->is_stuck; };
  if (!block->is_stuck) {
    for (Block* each : places) {
      each->is_stuck = false;
    }
  } else if (std::all_of(places.begin(), places.end(), is_stuck)) {
    report_blocks_that_wait();
  }
}

// The place whose block has the next turn. Either way the lowest number is the
// right one: forwards of the block that began first, backwards of the last.
size_t next_place(const std::vector<Block*>& places) {
  if (schedule == Schedule::by_chance) {
    return order() % places.size();
  }
  const auto comes_before = [](const Block* one, const Block* other) {
    if (one->is_stuck != other->is_stuck) {
      return other->is_stuck;
    }
    if (one->is_running != other->is_running) {
      return one->is_running == (schedule == Schedule::forwards);
    }
    return one->linear < other->linear;
  };
  return static_cast<size_t>(
      std::min_element(places.begin(), places.end(), comes_before) -
      places.begin());
}

// By turns, as many at a time as there are places.
void run_blocks(const std::vector<size_t>& numbers) {
  auto next = numbers.begin();
  std::vector<Block*> places;
  for (Block& each : blocks) {
    each.arrays.clear();
    each.is_stuck = false;
    places.push_back(&each);
  }
  while (!places.empty()) {
    const size_t place = next_place(places);
    block = places[place];
    if (!block->is_running) {
      if (next == numbers.end()) {
        places.erase(places.begin() + static_cast<std::ptrdiff_t>(place));
        continue;
      }
      begin_block(static_cast<unsigned>(*next++));
    }
    run_turn();
    note_changes();
    if (!block->is_running) {
      count_copies();
      count_accesses();
    }
    check_for_deadlock(places);
  }
}

}  // namespace

void launch(dim3 grid, dim3 threads, size_t dynamic_shared_bytes,
            const std::function<void()>& kernel, bool asks_for_shared_memory) {
  launched_shared_bytes =
      asks_for_shared_memory ? most_shared_bytes : kGrantedSharedBytes;
  check_launch(grid, threads, dynamic_shared_bytes);
  gridDim = grid;
  blockDim = threads;
  running_kernel = &kernel;
  dynamic_bytes = dynamic_shared_bytes;
  bounds_are_stated = false;
  waited_threads = 0;
  launched_threads = static_cast<size_t>(grid.x) * grid.y * grid.z * threads.x *
                     threads.y * threads.z;
  begin_to_watch();
  forget_turns();
  try {
    run_blocks(scheduled(static_cast<size_t>(grid.x) * grid.y * grid.z));
  } catch (...) {
    abandon_threads();
    throw;
  }
}

}  // namespace pkg::emulation
