#include "emulated_turns.h"

#include <algorithm>
#include <map>
#include <vector>

#include "emulator_state.h"
#include "waiting_blocks.h"

namespace pkg::emulation {
namespace {

// Who has accessed a vector in global memory last.
struct Accessed {
  unsigned by_block;
  int thread;
  uint32_t time;               // of that block
  bool is_on_its_way = false;  // a bulk copy that writes
};

// Of the block, all that came before its last barrier, and what the thread that
// passed the turn on has done itself.
struct Passed {
  unsigned by_block;
  int thread;
  uint32_t last_barrier;
  uint32_t time;
};

struct Waited {
  Passed passed;
  int thread;
  uint32_t time;
  bool is_before_copies = false;  // of that thread
};

std::map<const int*, Passed> passed_turns;
std::map<const void*, Accessed> accessed;
std::vector<Waited> waited_for[kBlocksAtATime];  // by the slots of the blocks

bool is_in_block_order(int thread, uint32_t time, int by, uint32_t barrier) {
  return thread == by || time <= barrier;
}

// Whether the running thread comes after the access of another block.
bool comes_after(const Accessed& access, bool by_copy) {
  const auto& known = waited_for[block->slot];
  return std::any_of(known.begin(), known.end(), [&](const Waited& waited) {
    const Passed& passed = waited.passed;
    const bool is_ordered =
        !by_copy || (waited.is_before_copies && waited.thread == running);
    return is_ordered && passed.by_block == access.by_block &&
           access.time <= passed.time &&
           is_in_block_order(access.thread, access.time, passed.thread,
                             passed.last_barrier) &&
           is_in_block_order(waited.thread, waited.time, running,
                             block->last_block_barrier);
  });
}

void note_turn(const int* counter) {
  const auto passed = passed_turns.find(counter);
  if (passed != passed_turns.end()) {
    waited_for[block->slot].push_back({passed->second, running, block->now});
  }
}

bool can_go_on(const Thread& thread) {
  return thread.state == State::in_turn &&
         *thread.counter == thread.wanted_turn;
}

}  // namespace

void forget_turns() {
  passed_turns.clear();
  accessed.clear();
}

void forget_waits() { waited_for[block->slot].clear(); }

bool some_wait_for_blocks() {
  return std::any_of(
      block->threads.begin(),
      block->threads.begin() + static_cast<std::ptrdiff_t>(block->thread_count),
      [](const auto& thread) { return thread->state == State::in_turn; });
}

void wake_those_in_turn() {
  for (size_t i = 0; i < block->thread_count; ++i) {
    if (can_go_on(*block->threads[i])) {
      block->threads[i]->state = State::ready;
    }
  }
}

void report_blocks_that_wait() {
  for (size_t i = 0; i < block->thread_count; ++i) {
    const Thread& thread = *block->threads[i];
    if (thread.state == State::in_turn) {
      report(
          "deadlock: thread %zu waits at %s:%u for turn %d, it is turn %d, and "
          "no block that runs can go on",
          i, thread.site.file_name(), thread.site.line(), thread.wanted_turn,
          *thread.counter);
    }
  }
}

bool TurnCounter::is(int turn) const {
  if (*counter_ != turn) {
    return false;
  }
  note_turn(counter_);
  return true;
}

void TurnCounter::wait(int turn, Site site) const {
  while (!is(turn)) {
    Thread& thread = *block->threads[running];
    thread.counter = counter_;
    thread.wanted_turn = turn;
    emulation::wait(State::in_turn, site);
  }
}

void TurnCounter::pass_to(int turn) const {
  *counter_ = turn;
  passed_turns[counter_] = {block->linear, running, block->last_block_barrier,
                            block->now};
}

int take_ticket(int* counter) { return (*counter)++; }

namespace {

void check_access_in_turn(const void* address, size_t bytes, bool writes,
                          bool by_copy) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    report("thread %d accesses %zu bytes at %p, which is not aligned", running,
           bytes, address);
  }
  const auto found = accessed.find(address);
  if (found == accessed.end()) {
    if (!writes) {
      report("thread %d reads numbers that no block has written", running);
    }
  } else {
    const Accessed& before = found->second;
    const bool is_ordered =
        before.by_block == block->linear
            ? is_in_block_order(before.thread, before.time, running,
                                block->last_block_barrier)
            : comes_after(before, by_copy);
    if (!is_ordered || before.is_on_its_way) {
      report(
          "race in global memory: thread %d %s numbers that thread %d of block "
          "%u has accessed, and has not waited for it",
          running, writes ? "writes" : "reads", before.thread, before.by_block);
    }
  }
  accessed[address] = {block->linear, running, block->now, by_copy && writes};
}

}  // namespace

void check_in_turn(const void* address, size_t bytes, bool writes) {
  check_access_in_turn(address, bytes, writes, false);
}

void check_copy_in_turn(const void* address, bool writes) {
  check_access_in_turn(address, 16, writes, true);
}

void note_arrival_in_turn(const void* address) {
  accessed.at(address).is_on_its_way = false;
}

void order_copies_after_turn() {
  for (Waited& waited : waited_for[block->slot]) {
    waited.is_before_copies |= waited.thread == running;
  }
}

}  // namespace pkg::emulation
