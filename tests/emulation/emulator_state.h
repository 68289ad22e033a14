// What the parts of the emulator know of the blocks that are running.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_emulator.h"
#include "fiber.h"

namespace pkg::emulation {

constexpr int kWarpSize = 32;
constexpr int kScheduler = -1;

enum class State {
  ready,
  in_block_barrier,
  in_warp_exchange,
  in_mbarrier,
  in_warpgroup,
  in_turn,
  finished,
};

// On its way to shared memory by cp.async.
struct Copy {
  const SharedStorage* storage;
  size_t index;
  size_t count;
  std::byte bytes[16];  // of which an element alone has fewer

  size_t size() const { return count * storage->element_size; }
};

// A function that a thread is in: the blocks of machine code on its way, none
// twice. To come to one again is to begin another turn of a loop, whose first
// block that is; what came after it is forgotten.
struct VisitedCode {
  uintptr_t block;
  uint64_t turn;
};
struct Activation {
  uint64_t call;  // tells by which calls, and in which turns of loops
  std::vector<VisitedCode> way;
};

struct Thread {
  Thread();
  Fiber fiber;
  uint3 index;
  State state = State::ready;
  Site site;
  // The turn of blocks that the thread waits for.
  const int* counter = nullptr;
  int wanted_turn = 0;
  // Groups of asynchronous copies, the oldest first; the last is not committed.
  std::deque<std::vector<Copy>> copies{{}};
  // Of each thread, and of the copies to each mbarrier, how much of what it did
  // comes before what this thread does next. Empty where the block has neither
  // mbarriers nor products of warpgroups.
  std::vector<uint32_t> clocks;
  // The own clock when what the thread had written was last published to copies
  // and products.
  uint32_t published = 0;
  std::vector<Activation> activations;  // as far as accesses are counted
};

// What the lanes named by one mask exchange. Two generations of values, since a
// lane may arrive at the next exchange before another has read this one.
struct Exchange {
  unsigned arrived = 0;
  uint64_t generation = 0;
  LaneBytes given[2][kWarpSize] = {};
  LaneBytes taken[2][kWarpSize] = {};
  Site site;
};

// Where a lane's asynchronous copy goes, and what it reads.
struct CopiedVector {
  size_t place;  // in shared memory, in bytes
  uintptr_t from;
  size_t size;
  size_t valid;
};

// What lanes of a warp access by one instruction, in the same turn of its
// loops.
struct AccessedPlace {
  int lane;
  uintptr_t place;
};
struct AccessRequest {
  AccessCount* count;
  size_t size;
  std::vector<AccessedPlace> places;
};

struct Warp {
  std::map<unsigned, Exchange> exchanges;
  uint32_t last_barrier = 0;
  // The copies of the block's lanes: the n-th of each is one instruction.
  std::vector<CopiedVector> copies[kWarpSize];
  std::unordered_map<uint64_t, AccessRequest> requests;
};

struct SharedArray : SharedStorage {
  std::vector<std::byte> owned_bytes;
  std::vector<AccessRecord> owned_records;
};

// Several blocks run by turns, each until a barrier.
constexpr size_t kBlocksAtATime = 3;

struct Block {
  explicit Block(size_t number) : slot(number) {}

  size_t slot;  // of kBlocksAtATime
  bool is_running = false;
  bool is_stuck = false;  // waits for another block, as in its last turn
  unsigned linear = 0;    // its number in the grid
  uint3 index;
  size_t thread_count = 0;
  // There may be more, of a larger block before.
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<size_t> threads_in_order;
  std::vector<Warp> warps;
  std::map<const char*, SharedArray> arrays;  // by declaration
  // Of shared elements that several threads have read since the last write, the
  // clock of each at its last read. (FastTrack's shared reads.)
  std::map<const AccessRecord*, std::vector<uint32_t>> readers;
  // Counts barriers of the block and of its warps, from 1.
  uint32_t now = 1;
  uint32_t last_block_barrier = 0;
};

extern Block* block;  // that has its turn
extern int running;   // a thread of it, or kScheduler
extern std::mt19937_64 order;

inline int warp_of(int thread) { return thread / kWarpSize; }

// Ends the launch: at once where the scheduler runs, else by way of it, as an
// exception cannot leave the fiber's stack. That stack is never used again.
[[noreturn]] [[gnu::format(printf, 1, 2)]] void report(const char* format, ...);
// The same as check_access for a product or another reader, on behalf of a
// thread of its warpgroup.
void check_product_read(const SharedStorage& storage, size_t index, int thread,
                        const char* reader = "a product");
// Suspends the running thread until it is made ready again.
void wait(State state, Site site);

}  // namespace pkg::emulation
