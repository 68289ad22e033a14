// Which threads know of what others have done, where barriers do not stop the
// whole block: a vector clock for each thread. (Flanagan and Freund,
// "FastTrack", PLDI 2009, for threads and, as one more each, the copies that
// count for an mbarrier.)
#pragma once

#include <cstdint>
#include <vector>

namespace pkg::emulation {

using Clocks = std::vector<uint32_t>;

constexpr int kMostMbarriers = 64;

// The clocks of the block's threads run from now on.
void start_clocks();
bool have_clocks();
// Of the running thread; 0 without clocks.
uint32_t own_clock();
// Whether what `other` did at that time of its clock comes before what the
// thread does now.
bool knows(int thread, int other, uint32_t clock);
void join(Clocks& clocks, const Clocks& others);
// What the thread does from now on, those do not know who know of it so far.
void advance_clock(int thread);
// The lanes of the warp have waited for each other.
void join_lanes(int warp);

}  // namespace pkg::emulation
