// What the scheduler asks of blocks that wait for each other.
#pragma once

namespace pkg::emulation {

// At the beginning of a launch, and of the block that has its turn.
void forget_turns();
void forget_waits();
// Of the block that has its turn.
bool some_wait_for_blocks();
void wake_those_in_turn();
void report_blocks_that_wait();

}  // namespace pkg::emulation
