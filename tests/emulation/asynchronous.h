// What the block has begun and nobody carries out but the hardware: copies of
// boxes and of numbers, and products of warpgroups. They run at any time, those
// of one warpgroup, and the two parts of a copy to global memory, in their
// order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda_emulator.h"

namespace pkg::emulation {

// Forgets what a block has begun, before the next one.
void forget_operations();

// Of one queue one after the other; those without queue in any order.
constexpr int kNoQueue = -1;
constexpr int kFirstBulkQueue = 1024;  // one for each copy to global memory
void add_operation(int queue, std::function<void()> operation);
bool has_operations();
// One of those that may be next.
void run_operation();
// Some or none, as the order of the launch has it, between two threads.
void run_some_operations();
// The next of the queue.
void run_operation_of(int queue);
// The next ones, until so many are left.
void run_operations_of(int queue, size_t left);

// What products and bulk copies read: they may still do so until their
// warpgroup, or their thread, has waited, and whoever writes there has to know
// that each of its warps, or the thread, has.
constexpr int kNoWarpgroup = -1;
struct Reading {
  const SharedStorage* storage;
  size_t begin;  // bytes
  size_t end;
  int warpgroup;
  int thread = 0;  // of no warpgroup
  uint64_t group;  // of products, or the queue of a copy
  uint32_t time;
  bool is_over = false;
  std::vector<uint32_t> clocks;  // of those who read, when it was over
};
void add_reading(const Reading& reading);
// Of the warpgroup's groups of products before this one.
void finish_readings(int warpgroup, uint64_t group);
// Of the running thread's bulk copy that has that queue.
void finish_reading_of(int queue);
// That the running thread may write there.
void check_not_read(const SharedStorage& storage, size_t begin, size_t end);

}  // namespace pkg::emulation
