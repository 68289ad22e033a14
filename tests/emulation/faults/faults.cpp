// Small kernels that are right, and the same with one fault each: what the
// emulator must accept, and what it must report. The first argument names one.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda/device/mma_places.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda/device/turns.cuh"
#include "pipelines.h"

namespace {

using pkg::emulation::launch;

constexpr int kThreads = 64;
constexpr unsigned kAllLanes = 0xffffffffu;

void expect(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "wrong result: %s\n", what);
    std::exit(1);
  }
}

// Sums over the block in shared memory; a barrier may be left out.
void block_sum(const float* input, float* output, int left_out) {
  PKG_SHARED(float, sums, [kThreads]);
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = input[blockIdx.x * blockDim.x + threadIdx.x];
  if (left_out != 0) {
    __syncthreads();
  }
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      sums[thread] += sums[thread + half];
    }
    if (left_out != half) {
      __syncthreads();
    }
  }
  if (thread == 0) {
    output[blockIdx.x] = sums[0];
  }
}

void run_block_sum(int left_out) {
  constexpr int kBlocks = 5;
  const std::vector<float> input(kBlocks * kThreads, 2.0f);
  std::vector<float> output(kBlocks);
  launch({kBlocks}, {kThreads}, 0,
         [&] { block_sum(input.data(), output.data(), left_out); });
  for (const float sum : output) {
    expect(sum == 2 * kThreads, "sum over a block");
  }
}

// Within a warp __syncwarp is enough; without it the reads race.
void reverse_in_warp(int* output, bool synchronised) {
  PKG_SHARED(int, values, [kThreads]);
  const int thread = static_cast<int>(threadIdx.x);
  values[thread] = thread;
  if (synchronised) {
    __syncwarp();
  }
  output[thread] = values[thread ^ 31];
}

void run_reverse(bool synchronised) {
  std::vector<int> output(kThreads);
  launch({1}, {kThreads}, 0,
         [&] { reverse_in_warp(output.data(), synchronised); });
  for (int thread = 0; thread < kThreads; ++thread) {
    expect(output[thread] == (thread ^ 31), "reversed warp");
  }
}

// __syncwarp does not order the accesses of other warps.
void across_warps() {
  PKG_SHARED(int, values, [kThreads]);
  const int thread = static_cast<int>(threadIdx.x);
  values[thread] = thread;
  __syncwarp();
  [[maybe_unused]] const int other = values[(thread + 32) % kThreads];
}

void shuffles() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  expect(__shfl_sync(kAllLanes, lane, 7) == 7, "shuffle");
  expect(__shfl_sync(kAllLanes, lane, 1, 8) == lane / 8 * 8 + 1,
         "shuffle of width 8");
  expect(__shfl_xor_sync(kAllLanes, lane, 5) == (lane ^ 5), "shuffle xor");
  expect(__shfl_up_sync(kAllLanes, lane, 3) == (lane < 3 ? lane : lane - 3),
         "shuffle up");
  expect(__shfl_down_sync(kAllLanes, lane, 3) == (lane > 28 ? lane : lane + 3),
         "shuffle down");
  expect(__shfl_xor_sync(kAllLanes, 0.5 * lane, 16) == 0.5 * (lane ^ 16),
         "shuffle of doubles");
  expect(__ballot_sync(kAllLanes, lane % 2) == 0xaaaaaaaau, "ballot");
  expect(__any_sync(kAllLanes, lane == 3) != 0, "any");
  expect(__all_sync(kAllLanes, lane < 31) == 0, "all");
  if (lane < 16) {
    expect(__shfl_sync(0xffffu, lane, 15) == 15, "shuffle of half a warp");
  }
}

void atomics(int* total, int* largest) {
  PKG_SHARED(int, count, [1]);
  if (threadIdx.x == 0) {
    count[0] = 0;
  }
  __syncthreads();
  atomicAdd(&count[0], 1);
  atomicMax(largest, static_cast<int>(threadIdx.x));
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(total, count[0]);
  }
}

void run_atomics() {
  int total = 0;
  int largest = 0;
  launch({3}, {kThreads}, 0, [&] { atomics(&total, &largest); });
  expect(total == 3 * kThreads, "atomic sum");
  expect(largest == kThreads - 1, "atomic maximum");
}

void dynamic_shared(size_t index) {
  const auto values = pkg::emulation::dynamic_shared<double>("values");
  values[static_cast<int64_t>(index + threadIdx.x)] = 1;
}

void several_dimensions(int row, int column) {
  PKG_SHARED(float, tile, [4][8]);
  tile[row][column] = 1;
}

void read_unwritten(float* output) {
  PKG_SHARED(float, values, [kThreads]);
  if (threadIdx.x != 5) {
    values[threadIdx.x] = 1;
  }
  __syncthreads();
  output[threadIdx.x] = values[threadIdx.x];
}

void divergent_barrier() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void early_exit() {
  if (threadIdx.x == 17) {
    return;
  }
  __syncthreads();
}

void lane_missing() {
  if (threadIdx.x != 3) {
    __shfl_xor_sync(kAllLanes, 1, 1);
  }
}

void lane_outside_mask() {
  if (threadIdx.x < 16) {
    __shfl_sync(0xffffu, 1, 20);
  }
}

// A warp copies 512 bytes to shared memory and reads them backwards.
void copy_rows(const float* input, float* output, bool waits, bool meets) {
  const auto rows = pkg::cuda::dynamic_shared<float>();
  const int thread = static_cast<int>(threadIdx.x);
  rows.copy_async(4 * thread, input + 4 * thread, thread < 31 ? 4 : 1);
  pkg::cuda::commit_copies();
  if (waits) {
    pkg::cuda::wait_for_copies<0>();
  }
  if (meets) {
    __syncwarp();
  }
  output[thread] = rows[4 * (31 - thread)];
  if (!waits) {
    pkg::cuda::wait_for_copies<0>();
  }
}

void run_copy(bool waits, bool meets, int offset) {
  std::vector<float> input(132);
  for (size_t i = 0; i < input.size(); ++i) {
    input[i] = static_cast<float>(i);
  }
  std::vector<float> output(32);
  launch({1}, {32}, 512, [&] {
    copy_rows(input.data() + offset, output.data(), waits, meets);
  });
  for (size_t i = 0; i < 32; ++i) {
    expect(output[i] == input[4 * (31 - i)], "copied");
  }
}

// Only one of two groups is waited for.
void copy_in_groups(const float* input, int pending) {
  const auto rows = pkg::cuda::dynamic_shared<float>();
  for (int group = 0; group < 2; ++group) {
    rows.copy_async(4 * group, input, group == 0 ? 4 : 0);
    pkg::cuda::commit_copies();
  }
  if (pending == 0) {
    pkg::cuda::wait_for_copies<0>();
  } else {
    pkg::cuda::wait_for_copies<1>();
  }
  expect(rows[0] == 0 && rows[3] == 3, "copied in the first group");
  expect(rows[4 * (1 - pending)] == 0, "zeros of the second group");
  if (pending == 1) {
    [[maybe_unused]] const float early = rows[4];
  }
}

void copy_without_end(const float* input) {
  pkg::cuda::dynamic_shared<float>().copy_async(0, input, 4);
}

// Eight rows of eight elements, four times; lane i says where row i is.
void load_matrices(bool transposed, int offset) {
  const auto rows = pkg::cuda::dynamic_shared<pkg::cuda::float16>();
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) {
    rows[8 * lane + i] =
        pkg::cuda::float16{static_cast<uint16_t>(8 * lane + i)};
  }
  __syncwarp();
  uint32_t words[4];
  rows.load_matrices(8 * lane + offset, transposed, words);
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t outer = static_cast<uint32_t>(lane) / 4;
      const uint32_t inner = static_cast<uint32_t>(lane) % 4 * 2 + half;
      const uint32_t place = transposed ? inner * 8 + outer : outer * 8 + inner;
      expect((words[matrix] >> 16 * half & 0xFFFFu) == matrix * 64 + place,
             "element of a matrix");
    }
  }
}

void run_load_matrices(bool transposed, int offset) {
  launch({1}, {32}, 528, [&] { load_matrices(transposed, offset); });
}

// Each block counts up from its own place; `overlap` of them are the next
// one's.
void run_blocks_side_by_side(unsigned overlap) {
  std::vector<std::byte> output(4 * kThreads);
  pkg::emulation::watch_output("output", output.data(), output.size());
  launch({3}, {kThreads + overlap}, 0, [&] {
    output[blockIdx.x * kThreads + threadIdx.x] =
        static_cast<std::byte>(blockIdx.x + 1);
  });
  expect(output[2 * kThreads] == std::byte{3}, "written by its block");
}

// Right where one block runs after the other, and wrong on a device.
void run_count_of_blocks() {
  constexpr int kBlocks = 8;
  int count = 0;
  launch({kBlocks}, {1}, 0, [&] {
    const int before = count;
    __syncthreads();
    count = before + 1;
  });
  expect(count == kBlocks, "count of blocks");
}

enum class TurnFault {
  none,
  no_wait,
  no_barrier_after_the_wait,
  no_barrier_before_passing,
  waits_for_later_blocks,
};

// Blocks add one to the same numbers, one after another.
void add_in_turn(float* sums, int* counters, TurnFault fault) {
  PKG_SHARED(int, ticket, [1]);
  const auto blocks = static_cast<int>(gridDim.x);
  const bool is_first_thread = threadIdx.x == 0;
  if (is_first_thread) {
    ticket[0] = pkg::cuda::take_ticket(counters);
  }
  __syncthreads();
  const int turn = fault == TurnFault::waits_for_later_blocks
                       ? blocks - 1 - ticket[0]
                       : static_cast<int>(ticket[0]);
  const pkg::cuda::TurnCounter counter(counters + 1);
  if (is_first_thread && fault != TurnFault::no_wait) {
    counter.wait(turn);
  }
  if (fault != TurnFault::no_barrier_after_the_wait) {
    __syncthreads();
  }
  float* const own = sums + 4 * threadIdx.x;
  pkg::cuda::FourNumbers four = {};
  if (turn > 0) {
    four = pkg::cuda::load_in_turn(own);
  }
  for (float& number : four.values) {
    number += 1;
  }
  pkg::cuda::store_in_turn(own, four);
  if (fault != TurnFault::no_barrier_before_passing) {
    __syncthreads();
  }
  if (is_first_thread) {
    counter.pass_to(turn + 1);
  }
}

void run_in_turn(TurnFault fault) {
  constexpr int kBlocks = 8;
  struct alignas(16) Four {
    float values[4] = {};
  };
  std::vector<Four> sums(kThreads);
  int counters[2] = {};
  launch({kBlocks}, {kThreads}, 0,
         [&] { add_in_turn(sums[0].values, counters, fault); });
  for (const Four& each : sums) {
    expect(each.values[3] == kBlocks, "sum over blocks");
  }
}

void print_place(const char* operand, int lane, int index,
                 pkg::cuda::MatrixPlace place) {
  std::printf("%s %d %d %d %d\n", operand, lane, index, place.row,
              place.column);
}

// Where each lane's elements of each operand lie, counted through its words.
template <int kSize>
void print_places() {
  using Places = pkg::cuda::MmaPlaces<kSize>;
  constexpr int kInWord = Places::kInWord;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4 * kInWord; ++i) {
      print_place("a", lane, i, Places::a(lane, i / kInWord, i % kInWord));
    }
    for (int i = 0; i < 2 * kInWord; ++i) {
      print_place("b", lane, i, Places::b(lane, i / kInWord, i % kInWord));
    }
    for (int i = 0; i < 4; ++i) {
      print_place("c", lane, i, Places::sum(lane, i));
    }
  }
}

void print_places_float64() {
  using Places = pkg::cuda::MmaPlacesFloat64;
  for (int lane = 0; lane < 32; ++lane) {
    print_place("a", lane, 0, Places::a(lane));
    print_place("b", lane, 0, Places::b(lane));
    print_place("c", lane, 0, Places::sum(lane, 0));
    print_place("c", lane, 1, Places::sum(lane, 1));
  }
}

// The bits that mma reads of a float32 that is rounded for it.
void rounding_to_tf32() {
  const auto rounds_to = [](uint32_t bits, uint32_t expected) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t read =
          pkg::cuda::round_to_tf32(bits | sign) & ~pkg::cuda::kBelowTf32;
      expect(read == (expected | sign), "rounding to TF32");
    }
  };
  rounds_to(0x00000000, 0x00000000);
  rounds_to(0x3F800FFF, 0x3F800000);  // less than half of the last place
  rounds_to(0x3F801000, 0x3F802000);  // ties: away from zero
  rounds_to(0x3F803000, 0x3F804000);
  rounds_to(0x3FFFF000, 0x40000000);  // to the next exponent
  rounds_to(0x00001000, 0x00002000);  // subnormal
  rounds_to(0x007FF000, 0x00800000);
  rounds_to(0x7F7FEFFF, 0x7F7FE000);
  rounds_to(0x7F7FFFFF, 0x7F7FE000);  // not to infinity
  rounds_to(0x7F800000, 0x7F800000);
  rounds_to(0x7FFFFFFF, 0x7FFFE000);  // NaN, as the device makes it
  rounds_to(0x7FC00000, 0x7FC00000);
}

// More than a launch has without being asked for, together.
void static_and_dynamic() {
  PKG_SHARED(float, values, [256]);
  const auto others = pkg::emulation::dynamic_shared<float>("others");
  values[threadIdx.x] = 1;
  others[threadIdx.x] = 1;
}

void run_static_and_dynamic(size_t dynamic_bytes, bool asks) {
  launch({1}, {kThreads}, dynamic_bytes, static_and_dynamic, asks);
}

void run_with_bounds(int64_t threads) {
  launch({2}, {kThreads}, 0,
         [&] { pkg::emulation::check_launch_bounds(threads); });
  expect(pkg::emulation::have_stated_bounds(), "stated bounds");
}

struct alignas(16) Vector {
  char bytes[16];
};
static_assert(pkg::cuda::parameter_bytes<>() == 0);
static_assert(pkg::cuda::parameter_bytes<char, Vector, char>() == 33);
template <int kBytes>
struct Parameter {
  char bytes[kBytes];
};
static_assert(pkg::cuda::fits_parameters<Parameter<32764>>);
static_assert(!pkg::cuda::fits_parameters<Parameter<32765>>);
static_assert(!pkg::cuda::fits_parameters<char, Vector, Parameter<32733>>);
static_assert(pkg::cuda::grid_of(7) == 7);
static_assert(pkg::cuda::grid_of(int64_t{1} << 33) == 0x7fffffff);

void launch_nothing(dim3 grid, dim3 threads, size_t dynamic_bytes = 0) {
  launch(grid, threads, dynamic_bytes, [] {}, true);
}

void write_global(float* output, size_t index) { output[index] = 1; }

void in_blocks(const std::function<void()>& kernel) {
  launch({2}, {kThreads}, kThreads * sizeof(double), kernel);
}

}  // namespace

int main(int, char** arguments) {
  std::vector<float> global(kThreads);
  const std::vector<float> counted = {0, 1, 2, 3};
  std::map<std::string, std::function<void()>> cases = {
      {"right: block sum", [] { run_block_sum(-1); }},
      {"right: warp barrier", [] { run_reverse(true); }},
      {"right: shuffles", [] { in_blocks(shuffles); }},
      {"right: atomics", [] { run_atomics(); }},
      {"right: dynamic shared", [] { in_blocks([] { dynamic_shared(0); }); }},
      {"right: launch bounds", [] { run_with_bounds(kThreads); }},
      {"block beyond the launch bounds", [] { run_with_bounds(kThreads - 1); }},
      {"right: static and dynamic shared",
       [] { run_static_and_dynamic(47 * 1024, false); }},
      {"static and dynamic shared that nobody asked for",
       [] { run_static_and_dynamic(48 * 1024, false); }},
      {"right: static and dynamic shared that the host asked for",
       [] { run_static_and_dynamic(48 * 1024, true); }},
      {"static and dynamic shared of no device",
       [] { run_static_and_dynamic(227 * 1024, true); }},
      {"right: all shared memory",
       [] { launch_nothing({1}, {1}, 227 * 1024); }},
      {"more shared memory than the device has",
       [] {
         pkg::emulation::set_most_shared_bytes(99 * 1024);
         launch_nothing({1}, {1}, 99 * 1024 + 16);
       }},
      {"block of too many threads", [] { launch_nothing({1}, {512, 2, 2}); }},
      {"block of no threads", [] { launch_nothing({1}, {0}); }},
      {"grid of no blocks", [] { launch_nothing({0}, {1}); }},
      {"grid of too many blocks", [] { launch_nothing({0x80000000u}, {1}); }},
      {"grid that is too high", [] { launch_nothing({1, 65536}, {1}); }},
      {"right: several dimensions",
       [] { launch({1}, {1}, 0, [] { several_dimensions(3, 7); }); }},
      {"right: asynchronous copy", [] { run_copy(true, true, 0); }},
      {"right: groups of copies",
       [&] {
         launch({1}, {1}, 512, [&] { copy_in_groups(counted.data(), 0); });
       }},
      {"right: matrices", [] { run_load_matrices(false, 0); }},
      {"right: rounding to TF32", rounding_to_tf32},
      {"right: transposed matrices", [] { run_load_matrices(true, 0); }},
      {"copy that nobody waits for",
       [&] {
         launch({1}, {1}, 512, [&] { copy_without_end(counted.data()); });
       }},
      {"copy read before the wait", [] { run_copy(false, true, 0); }},
      {"copy of another lane without a barrier",
       [] { run_copy(true, false, 0); }},
      {"copy from a misaligned place", [] { run_copy(true, true, 1); }},
      {"copy of a later group",
       [&] {
         launch({1}, {1}, 512, [&] { copy_in_groups(counted.data(), 1); });
       }},
      {"misaligned row of a matrix", [] { run_load_matrices(false, 4); }},
      {"right: blocks side by side", [] { run_blocks_side_by_side(0); }},
      {"output of two blocks", [] { run_blocks_side_by_side(1); }},
      {"blocks that count without atomics", run_count_of_blocks},
      {"right: blocks in turn", [] { run_in_turn(TurnFault::none); }},
      {"turn that is not waited for", [] { run_in_turn(TurnFault::no_wait); }},
      {"no barrier after the wait for a turn",
       [] { run_in_turn(TurnFault::no_barrier_after_the_wait); }},
      {"no barrier before a turn is passed on",
       [] { run_in_turn(TurnFault::no_barrier_before_passing); }},
      {"blocks that wait for later ones",
       [] { run_in_turn(TurnFault::waits_for_later_blocks); }},
      {"places of 8 bits", print_places<1>},
      {"places of 16 bits", print_places<2>},
      {"places of 32 bits", print_places<4>},
      {"places of 64 bits", print_places_float64},
      {"right: global store",
       [&] { in_blocks([&] { write_global(global.data(), threadIdx.x); }); }},
      {"missing barrier after the store", [] { run_block_sum(0); }},
      {"missing barrier in the loop", [] { run_block_sum(16); }},
      {"missing warp barrier", [] { run_reverse(false); }},
      {"warp barrier across warps", [] { in_blocks(across_warps); }},
      {"read of unwritten shared memory",
       [&] { in_blocks([&] { read_unwritten(global.data()); }); }},
      {"shared index beyond a row",
       [] { launch({1}, {1}, 0, [] { several_dimensions(1, 8); }); }},
      {"negative shared index",
       [] { launch({1}, {1}, 0, [] { several_dimensions(-1, 0); }); }},
      {"dynamic index beyond the end",
       [] { in_blocks([] { dynamic_shared(1); }); }},
      {"divergent barrier", [] { in_blocks(divergent_barrier); }},
      {"exit before a barrier", [] { in_blocks(early_exit); }},
      {"lane missing from a shuffle", [] { in_blocks(lane_missing); }},
      {"lane outside the mask", [] { in_blocks(lane_outside_mask); }},
      {"global store beyond the end",
       [&] {
         in_blocks([&] { write_global(global.data(), threadIdx.x + 1); });
       }},
  };
  cases.merge(pipeline_cases());
  cases.merge(bulk_copy_cases());
  try {
    cases.at(arguments[1])();
  } catch (const pkg::emulation::Report& report) {
    std::fprintf(stderr, "%s\n", report.what());
    return 1;
  }
}
