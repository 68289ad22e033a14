// Small kernels that are right, and the same with one fault each: what the
// emulator must accept, and what it must report. The first argument names one.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda_emulator.h"

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
  PKG_DYNAMIC_SHARED(double, values);
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

void write_global(float* output, size_t index) { output[index] = 1; }

void in_blocks(const std::function<void()>& kernel) {
  launch({2}, {kThreads}, kThreads * sizeof(double), kernel);
}

}  // namespace

int main(int, char** arguments) {
  std::vector<float> global(kThreads);
  const std::map<std::string, std::function<void()>> cases = {
      {"right: block sum", [] { run_block_sum(-1); }},
      {"right: warp barrier", [] { run_reverse(true); }},
      {"right: shuffles", [] { in_blocks(shuffles); }},
      {"right: atomics", [] { run_atomics(); }},
      {"right: dynamic shared", [] { in_blocks([] { dynamic_shared(0); }); }},
      {"right: several dimensions",
       [] { launch({1}, {1}, 0, [] { several_dimensions(3, 7); }); }},
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
  try {
    cases.at(arguments[1])();
  } catch (const pkg::emulation::Report& report) {
    std::fprintf(stderr, "%s\n", report.what());
    return 1;
  }
}
