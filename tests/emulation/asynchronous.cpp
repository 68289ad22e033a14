#include "asynchronous.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "clocks.h"
#include "emulator_state.h"

namespace pkg::emulation {
namespace {

constexpr int kWarpgroupSize = 128;

using Queue = std::deque<std::function<void()>>;

struct Operations {
  std::map<int, Queue> queues;
  // Of 8: how probable it is that the next operation runs at once.
  unsigned eagerness = 0;
  std::vector<Reading> readings;
};

Operations of_blocks[kBlocksAtATime];

Operations& operations() { return of_blocks[block->slot]; }

void run_at(Queue& queue, size_t place) {
  const std::function<void()> operation = std::move(queue[place]);
  queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(place));
  operation();
}

// Whether the reader, or a lane of each of its warps, is known to have waited.
bool knows_the_end(const Reading& reading) {
  if (reading.warpgroup == kNoWarpgroup) {
    return knows(running, reading.thread, reading.clocks[0]);
  }
  for (int warp = 0; warp < kWarpgroupSize / kWarpSize; ++warp) {
    bool known = false;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int thread = warp * kWarpSize + lane;
      known =
          known || knows(running, reading.warpgroup * kWarpgroupSize + thread,
                         reading.clocks[thread]);
    }
    if (!known) {
      return false;
    }
  }
  return true;
}

}  // namespace

void forget_operations() { operations() = {}; }

void add_operation(int queue, std::function<void()> operation) {
  if (!has_operations()) {
    constexpr unsigned kProbabilities[] = {0, 1, 4, 7};
    operations().eagerness = kProbabilities[order() % 4];
  }
  operations().queues[queue].push_back(std::move(operation));
}

bool has_operations() {
  return std::ranges::any_of(operations().queues, [](const auto& queue) {
    return !queue.second.empty();
  });
}

void run_operation() {
  std::vector<std::pair<int, size_t>> next;
  for (const auto& [number, queue] : operations().queues) {
    const size_t free = number == kNoQueue ? queue.size() : 1;
    for (size_t place = 0; place < std::min(free, queue.size()); ++place) {
      next.emplace_back(number, place);
    }
  }
  const auto [number, place] = next[order() % next.size()];
  run_at(operations().queues[number], place);
  std::erase_if(operations().queues,
                [](const auto& queue) { return queue.second.empty(); });
}

void run_some_operations() {
  while (has_operations() && order() % 8 < operations().eagerness) {
    run_operation();
  }
}

void run_operation_of(int queue) { run_at(operations().queues[queue], 0); }

void run_operations_of(int queue, size_t left) {
  const auto found = operations().queues.find(queue);
  if (found == operations().queues.end()) {
    return;
  }
  while (found->second.size() > left) {
    run_at(found->second, 0);
  }
  if (found->second.empty()) {
    operations().queues.erase(found);
  }
}

void add_reading(const Reading& reading) {
  // An earlier one of the same place that is over is followed by this one.
  std::erase_if(operations().readings, [&](const Reading& other) {
    return other.is_over && other.storage == reading.storage &&
           other.begin == reading.begin && other.end == reading.end &&
           other.warpgroup == reading.warpgroup &&
           other.thread == reading.thread;
  });
  operations().readings.push_back(reading);
}

void finish_readings(int warpgroup, uint64_t group) {
  std::vector<uint32_t> clocks(kWarpgroupSize);
  const int first = warpgroup * kWarpgroupSize;
  for (int thread = 0; thread < kWarpgroupSize; ++thread) {
    clocks[thread] = block->threads[first + thread]->clocks[first + thread];
  }
  for (Reading& reading : operations().readings) {
    if (reading.warpgroup == warpgroup && reading.group < group &&
        !reading.is_over) {
      reading.is_over = true;
      reading.clocks = clocks;
    }
  }
}

void finish_reading_of(int queue) {
  const uint32_t clock = block->threads[running]->clocks[running];
  for (Reading& reading : operations().readings) {
    if (reading.warpgroup == kNoWarpgroup &&
        reading.group == static_cast<uint64_t>(queue)) {
      reading.is_over = true;
      reading.clocks = {clock};
    }
  }
}

namespace {

std::string words_of(const Reading& reading) {
  return reading.warpgroup == kNoWarpgroup
             ? "a bulk copy of thread " + std::to_string(reading.thread)
             : "a product of warpgroup " + std::to_string(reading.warpgroup);
}

}  // namespace

void check_not_read(const SharedStorage& storage, size_t begin, size_t end) {
  for (const Reading& reading : operations().readings) {
    if (reading.storage != &storage || reading.end <= begin ||
        end <= reading.begin) {
      continue;
    }
    if (!reading.is_over) {
      report(
          "thread %d writes bytes %zu to %zu of shared %s, which %s reads that "
          "nobody has waited for",
          running, begin, end, storage.name, words_of(reading).c_str());
    }
    if (reading.time > block->last_block_barrier && !knows_the_end(reading)) {
      report(
          "race on shared %s, bytes %zu to %zu: thread %d writes what %s has "
          "read, and does not know of each of its warps that it has waited for "
          "it",
          storage.name, begin, end, running, words_of(reading).c_str());
    }
  }
}

}  // namespace pkg::emulation
