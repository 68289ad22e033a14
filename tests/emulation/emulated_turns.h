// Blocks that wait for each other, as csrc/cuda/device/turns.cuh has it.
//
// A block that waits keeps its place among those that run by turns. Reported
// are, beside what cuda_emulator.h says:
//
//   - that all blocks that run wait, and none of them can go on: a deadlock,
//   - numbers in global memory that a block reads or writes after another one
//     without having waited for it: the other has not passed its turn on after
//     a barrier, or after its bulk copies have arrived, or this one has no
//     barrier after its wait, or does not order its bulk copies after it.
//
// What is known of a wait is the last turn that was passed on. Whether the
// counter is written and read with the order that a device needs for it, the
// instructions say, which are not emulated.
#pragma once

#include "cuda_emulator.h"

namespace pkg::emulation {

class TurnCounter {
 public:
  explicit TurnCounter(int* counter) : counter_(counter) {}

  bool is(int turn) const;
  void wait(int turn, Site site = Site::current()) const;
  void pass_to(int turn) const;

 private:
  int* counter_;
};

int take_ticket(int* counter);
// An access of the running thread to an aligned vector of so many bytes.
void check_in_turn(const void* address, size_t bytes, bool writes);
// The same by a bulk copy that the running thread begins: of sixteen bytes. It
// must have ordered its copies after its turn, and what one writes is on its
// way until it arrives.
void check_copy_in_turn(const void* address, bool writes);
void note_arrival_in_turn(const void* address);
void order_copies_after_turn();

}  // namespace pkg::emulation
