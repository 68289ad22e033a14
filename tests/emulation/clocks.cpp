#include "clocks.h"

#include <algorithm>

#include "emulator_state.h"

namespace pkg::emulation {

void start_clocks() {
  if (have_clocks()) {
    return;
  }
  for (size_t i = 0; i < block->thread_count; ++i) {
    block->threads[i]->clocks.assign(block->thread_count + kMostMbarriers, 0);
    block->threads[i]->clocks[i] = 1;
  }
}

bool have_clocks() {
  return !block->threads.empty() && !block->threads[0]->clocks.empty();
}

uint32_t own_clock() {
  return have_clocks() ? block->threads[running]->clocks[running] : 0;
}

bool knows(int thread, int other, uint32_t clock) {
  return clock > 0 && block->threads[thread]->clocks[other] >= clock;
}

void join(Clocks& clocks, const Clocks& others) {
  clocks.resize(others.size());
  std::transform(others.begin(), others.end(), clocks.begin(), clocks.begin(),
                 [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

void advance_clock(int thread) { ++block->threads[thread]->clocks[thread]; }

void join_lanes(int warp) {
  const int first = warp * kWarpSize;
  const int end =
      std::min(first + kWarpSize, static_cast<int>(block->thread_count));
  Clocks all;
  for (int thread = first; thread < end; ++thread) {
    join(all, block->threads[thread]->clocks);
  }
  for (int thread = first; thread < end; ++thread) {
    block->threads[thread]->clocks = all;
    advance_clock(thread);
  }
}

}  // namespace pkg::emulation
