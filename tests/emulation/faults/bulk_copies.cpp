// Blocks whose copies of numbers are added in turn: right, and with one fault
// each.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/turns.cuh"
#include "pipelines.h"

namespace {

using namespace pkg::cuda;

constexpr int kThreads = 64;
constexpr int kBlocks = 6;
constexpr int kRounds = 2;
constexpr int kNumbers = 4 * kThreads;
constexpr int kBytes = kNumbers * sizeof(float);

enum class Fault {
  none,
  not_published,
  no_wait_for_reads,
  no_wait_for_arrival,
  no_wait_for_turn,
  not_ordered_after_turn,
  misaligned,
  never_committed,
};

struct alignas(16) Numbers {
  float values[kNumbers];
};

// Each block adds what its threads have written, a round after the other.
void add_round(const SharedSpan<float>& memory, float* sums, int* counter,
               int turn, Fault fault) {
  memory.store(4 * threadIdx.x, FourNumbers{{1, 2, 3, 4}});
  if (fault != Fault::not_published) {
    publish_shared_memory();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (fault != Fault::no_wait_for_turn) {
      TurnCounter(counter).wait(turn);
    }
    if (fault != Fault::not_ordered_after_turn) {
      order_copies_after_turn();
    }
    const int index = fault == Fault::misaligned ? 1 : 0;
    if (turn == 0) {
      store_numbers_in_turn(memory, index, sums, kBytes);
    } else {
      add_numbers_in_turn(memory, index, sums, kBytes);
    }
    if (fault != Fault::never_committed) {
      commit_bulk_copies();
    }
    if (fault != Fault::no_wait_for_reads) {
      wait_for_bulk_reads();
    }
  }
  __syncthreads();
  if (fault == Fault::no_wait_for_reads) {
    memory.store(4 * threadIdx.x, FourNumbers{});
  }
  if (threadIdx.x == 0) {
    if (fault != Fault::no_wait_for_arrival) {
      wait_for_bulk_copies();
    }
    TurnCounter(counter).pass_to(turn + 1);
  }
}

// The last block in turn loads the sums.
void kernel(Numbers* sums, int* counters, float* output, Fault fault) {
  PKG_SHARED(int, ticket, [1]);
  PKG_MBARRIERS(loaded, 1);
  const SharedSpan<float> memory = dynamic_shared<float>();
  if (threadIdx.x == 0) {
    ticket[0] = take_ticket(counters);
    loaded.init(0, 1);
    publish_mbarriers();
  }
  __syncthreads();
  for (int round = 0; round < kRounds; ++round) {
    add_round(memory, sums[round].values, counters + 1 + round, ticket[0],
              fault);
  }
  if (ticket[0] < kBlocks - 1) {
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    loaded.arrive_and_expect(0, kBytes);
    copy_numbers_in_turn(memory, 0, sums[1].values, kBytes, loaded, 0);
  }
  loaded.wait(0, 0);
  const int index = 4 * static_cast<int>(threadIdx.x);
  output[threadIdx.x] = memory.load<FourNumbers>(index).values[3];
}

void run(Fault fault) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    pkg::emulation::set_order(seed);
    std::vector<Numbers> sums(kRounds);
    std::vector<float> output(kThreads);
    int counters[1 + kRounds] = {};
    pkg::emulation::launch({kBlocks}, {kThreads}, kBytes, [&] {
      kernel(sums.data(), counters, output.data(), fault);
    });
    for (const float each : output) {
      if (each != 4 * kBlocks) {
        std::fprintf(stderr, "wrong result: sums in turn\n");
        std::exit(1);
      }
    }
  }
}

}  // namespace

std::map<std::string, std::function<void()>> bulk_copy_cases() {
  const std::map<std::string, Fault> faults = {
      {"right: numbers in turn", Fault::none},
      {"numbers that are not published", Fault::not_published},
      {"numbers overwritten before they are read", Fault::no_wait_for_reads},
      {"turn passed on before numbers arrive", Fault::no_wait_for_arrival},
      {"numbers not in their turn", Fault::no_wait_for_turn},
      {"numbers not ordered after the turn", Fault::not_ordered_after_turn},
      {"misaligned numbers", Fault::misaligned},
      {"numbers that are not committed", Fault::never_committed},
  };
  std::map<std::string, std::function<void()>> cases;
  for (const auto& [name, fault] : faults) {
    cases[name] = [fault] { run(fault); };
  }
  return cases;
}
