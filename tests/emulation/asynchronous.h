// What the block has begun and nobody carries out but the hardware: copies of
// boxes, and products of warpgroups. They run at any time, those of one
// warpgroup in their order.
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
void add_operation(int queue, std::function<void()> operation);
bool has_operations();
// One of those that may be next.
void run_operation();
// Some or none, as the order of the launch has it, between two threads.
void run_some_operations();
// The next of the queue, or nothing.
void run_operation_of(int queue);

// What products read: they may still do so until their warpgroup has waited,
// and whoever writes there has to know that each of its warps has.
struct Reading {
  const SharedStorage* storage;
  size_t begin;  // bytes
  size_t end;
  int warpgroup;
  uint64_t group;  // of products
  uint32_t time;
  bool is_over = false;
  std::vector<uint32_t> clocks;  // of the warpgroup's threads, when it was over
};
void add_reading(const Reading& reading);
// Of the warpgroup's groups of products before this one.
void finish_readings(int warpgroup, uint64_t group);
// That the running thread may write there.
void check_not_read(const SharedStorage& storage, size_t begin, size_t end);

}  // namespace pkg::emulation
