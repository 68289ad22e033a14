// A product of 64 x 64 by one warpgroup, whose operands a further warp has
// copied: right, and with one fault each.
#include "pipelines.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/device/mma_places.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"

namespace {

using namespace pkg::cuda;

constexpr int kSize = 64;                // rows, columns
constexpr int kSteps = 5;                // boxes along the summed dimension
constexpr int kDepth = kSteps * 64 - 8;  // the last box is not full
constexpr int kStages = 2;
constexpr int kBox = 64 * 64;  // elements
constexpr int kThreads = kWarpgroup + 32;
constexpr int kBoxBytes = 8192;

enum class Fault {
  none,
  barriers_not_published,
  no_barrier_after_init,
  no_wait_for_copies,
  no_wait_for_space,
  released_early,
  released_by_one_warp,
  arrived_too_often,
  bytes_not_expected,
  bytes_never_copied,
  wrong_parity,
  registers_not_ordered,
  sums_touched_early,
  never_waited,
  copy_nobody_waits_for,
  box_misaligned,
  operand_misaligned,
  warps_disagree,
  half_a_warpgroup,
};

struct Operands {
  TensorMap a;
  TensorMap b;
  float* sums;
};

template <Major kMajorA, Major kMajorB>
struct Pipeline {
  const Operands& operands;
  Fault fault;
  const SharedSpan<bfloat16>& memory;
  const Mbarriers& full;
  const Mbarriers& empty;

  bool has(Fault asked) const { return fault == asked; }

  void produce() const {
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % kStages;
      if (!has(Fault::no_wait_for_space)) {
        const uint32_t parity = step / kStages % 2 == 0 ? 1 : 0;
        empty.wait(stage, has(Fault::wrong_parity) ? 0 : parity);
      }
      const int bytes = has(Fault::bytes_not_expected)   ? kBoxBytes
                        : has(Fault::bytes_never_copied) ? 3 * kBoxBytes
                                                         : 2 * kBoxBytes;
      full.arrive_and_expect(stage, bytes);
      copy(operands.a, kMajorA, 2 * stage, step, stage);
      copy(operands.b, kMajorB, 2 * stage + 1, step, stage);
    }
    if (has(Fault::copy_nobody_waits_for)) {
      full.arrive_and_expect(kStages, kBoxBytes);
      copy(operands.a, kMajorA, 2 * kStages, 0, kStages);
    }
  }

  void copy(const TensorMap& map, Major major, int box, int step,
            int stage) const {
    const bool by_steps = major == Major::outer;
    const int shift = has(Fault::box_misaligned) ? 64 : 0;
    copy_box(memory, box * kBox + shift, map, by_steps ? 0 : 64 * step,
             by_steps ? 64 * step : 0, 0, full, stage);
  }

  void begin_step(float (&sums)[2][16], int stage) const {
    const int shift = has(Fault::operand_misaligned) ? 64 : 0;
    const WarpgroupOperand a(memory, 2 * stage * kBox + shift);
    const WarpgroupOperand b(memory, (2 * stage + 1) * kBox);
    if (!has(Fault::registers_not_ordered)) {
      order_registers();
    }
    for (int i = 0; i < 4; ++i) {
      const bool other = has(Fault::warps_disagree) && threadIdx.x / 32 == 2;
      begin_product<bfloat16, kMajorA, kMajorB>(
          sums, a.at(i * (kMajorA == Major::outer ? 2048 : 32)),
          b.at((other ? i ^ 1 : i) * (kMajorB == Major::outer ? 2048 : 32)));
    }
    commit_products();
  }

  void release(int stage) const {
    const unsigned one_of = has(Fault::released_by_one_warp) ? 128 : 32;
    if (threadIdx.x % one_of == 0) {
      empty.arrive(stage);
    }
  }

  void consume(float (&sums)[2][16]) const {
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % kStages;
      if (!has(Fault::no_wait_for_copies)) {
        full.wait(stage, static_cast<uint32_t>(step / kStages % 2));
      }
      begin_step(sums, stage);
      if (has(Fault::released_early)) {
        release(stage);
      }
      if (has(Fault::sums_touched_early)) {
        sums[0][0] = 1.0f;
      }
      if (!has(Fault::never_waited)) {
        wait_for_products<0>();
      }
      if (!has(Fault::released_early)) {
        release(stage);
      }
    }
  }
};

template <Major kMajorA, Major kMajorB>
void kernel(const Operands& operands, Fault fault) {
  PKG_MBARRIERS(full, kStages + 1);
  PKG_MBARRIERS(empty, kStages);
  const SharedSpan<bfloat16> memory = dynamic_shared<bfloat16>();
  if (threadIdx.x == 0) {
    const bool is_one = fault == Fault::released_by_one_warp ||
                        fault == Fault::arrived_too_often;
    for (int stage = 0; stage < kStages; ++stage) {
      full.init(stage, 1);
      empty.init(stage, is_one ? 1 : 4);
    }
    full.init(kStages, 1);
    if (fault != Fault::barriers_not_published) {
      publish_mbarriers();
    }
  }
  if (fault != Fault::no_barrier_after_init) {
    __syncthreads();
  }
  const Pipeline<kMajorA, kMajorB> pipeline{operands, fault, memory, full,
                                            empty};
  if (threadIdx.x >= kWarpgroup) {
    if (threadIdx.x == kWarpgroup) {
      pipeline.produce();
    }
    return;
  }
  if (fault == Fault::half_a_warpgroup && threadIdx.x >= 64) {
    return;
  }
  float sums[2][16] = {};
  pipeline.consume(sums);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 16; ++j) {
      const MatrixPlace at = MmaPlaces<2>::sum(thread % 32, 2 * i + j % 2);
      operands
          .sums[(thread / 32 * 16 + at.row) * kSize + j / 2 * 8 + at.column] =
          sums[i][j];
    }
  }
}

// Small integers, so that sums are exact.
float value(int seed, int outer, int depth) {
  return static_cast<float>((seed * 7 + outer * 3 + depth * 5) % 11 - 5);
}

std::vector<bfloat16> matrix(int seed, Major major) {
  std::vector<bfloat16> elements(static_cast<size_t>(kSize * kDepth));
  for (int outer = 0; outer < kSize; ++outer) {
    for (int depth = 0; depth < kDepth; ++depth) {
      const int place = major == Major::outer ? depth * kSize + outer
                                              : outer * kDepth + depth;
      elements[static_cast<size_t>(place)] =
          convert<bfloat16>(value(seed, outer, depth));
    }
  }
  return elements;
}

TensorMap map_of(const std::vector<bfloat16>& elements, Major major) {
  const bool by_steps = major == Major::outer;
  const MappedTensor<bfloat16> tensor = {elements.data(),
                                         by_steps ? kSize : kDepth,
                                         by_steps ? kDepth : kSize,
                                         1,
                                         by_steps ? kSize : kDepth,
                                         0,
                                         64};
  return encode_tensor_map(tensor);
}

void check(const std::vector<float>& sums) {
  for (int row = 0; row < kSize; ++row) {
    for (int column = 0; column < kSize; ++column) {
      float expected = 0;
      for (int depth = 0; depth < kDepth; ++depth) {
        expected += value(1, row, depth) * value(2, column, depth);
      }
      if (sums[static_cast<size_t>(row * kSize + column)] != expected) {
        std::fprintf(stderr, "wrong result: product\n");
        std::exit(1);
      }
    }
  }
}

template <Major kMajorA, Major kMajorB>
void run(Fault fault) {
  for (uint64_t order = 0; order < 4; ++order) {
    pkg::emulation::set_order(order);
    const std::vector<bfloat16> a = matrix(1, kMajorA);
    const std::vector<bfloat16> b = matrix(2, kMajorB);
    std::vector<float> sums(kSize * kSize);
    const Operands operands = {map_of(a, kMajorA), map_of(b, kMajorB),
                               sums.data()};
    pkg::emulation::launch({1}, {kThreads}, (2 * kStages + 2) * kBoxBytes,
                           [&] { kernel<kMajorA, kMajorB>(operands, fault); });
    check(sums);
  }
}

// Operands that the threads write themselves: A to shared memory or to
// registers, B to shared memory as SwizzledTile has it.
void written_by_threads(float* output, bool a_in_registers, bool published) {
  using Slice = SwizzledTile<bfloat16, kSize, 64>;
  const SharedSpan<bfloat16> memory = dynamic_shared<bfloat16>();
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kBox; i += kWarpgroup) {
    const int place = Slice::index(i / 64, i % 64);
    memory[place] = convert<bfloat16>(value(1, i / 64, i % 64));
    memory[kBox + place] = convert<bfloat16>(value(2, i / 64, i % 64));
  }
  if (published) {
    publish_shared_memory();
  }
  __syncthreads();
  uint32_t words[4][4];
  for (int step = 0; step < 4; ++step) {
    for (int word = 0; word < 4; ++word) {
      const MatrixPlace at = MmaPlaces<2>::a(thread % 32, word, 0);
      const int row = thread / 32 * 16 + at.row;
      const int depth = step * 16 + at.column;
      words[step][word] =
          pair_of<bfloat16>(value(1, row, depth), value(1, row, depth + 1));
    }
  }
  float sums[2][16];
  const WarpgroupOperand a(memory, 0);
  const WarpgroupOperand b(memory, kBox);
  order_registers();
  for (int step = 0; step < 4; ++step) {
    if (a_in_registers) {
      begin_product<bfloat16, Major::depth>(sums, words[step], b.at(32 * step),
                                            step > 0);
    } else {
      begin_product<bfloat16, Major::depth, Major::depth>(
          sums, a.at(32 * step), b.at(32 * step), step > 0);
    }
  }
  commit_products();
  wait_for_products<0>();
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 16; ++j) {
      const MatrixPlace at = MmaPlaces<2>::sum(thread % 32, 2 * i + j % 2);
      output[(thread / 32 * 16 + at.row) * kSize + j / 2 * 8 + at.column] =
          sums[i][j];
    }
  }
}

void run_written(bool a_in_registers, bool published) {
  std::vector<float> sums(kSize * kSize);
  pkg::emulation::launch({1}, {kWarpgroup}, 2 * kBoxBytes, [&] {
    written_by_threads(sums.data(), a_in_registers, published);
  });
  for (int row = 0; row < kSize; ++row) {
    for (int column = 0; column < kSize; ++column) {
      float expected = 0;
      for (int depth = 0; depth < 64; ++depth) {
        expected += value(1, row, depth) * value(2, column, depth);
      }
      if (sums[static_cast<size_t>(row * kSize + column)] != expected) {
        std::fprintf(stderr, "wrong result: product of what threads wrote\n");
        std::exit(1);
      }
    }
  }
}

// The fields of a descriptor, by their bits.
void print_descriptor() {
  const MatrixDescriptor descriptor(0x12340, 8192);
  std::printf("%016llx\n", static_cast<unsigned long long>(descriptor.words()));
  std::printf("%016llx\n",
              static_cast<unsigned long long>(descriptor.at(2048).words()));
}

template <Major kMajorA, Major kMajorB>
std::function<void()> with(Fault fault) {
  return [fault] { run<kMajorA, kMajorB>(fault); };
}

}  // namespace

std::map<std::string, std::function<void()>> pipeline_cases() {
  constexpr Major kDeep = Major::depth;
  constexpr Major kOuter = Major::outer;
  std::map<std::string, std::function<void()>> cases = {
      {"right: pipeline", with<kDeep, kDeep>(Fault::none)},
      {"right: pipeline of columns", with<kOuter, kDeep>(Fault::none)},
      {"right: pipeline of rows", with<kDeep, kOuter>(Fault::none)},
      {"right: pipeline of both", with<kOuter, kOuter>(Fault::none)},
      {"right: operands of threads", [] { run_written(false, true); }},
      {"right: operand in registers", [] { run_written(true, true); }},
      {"operands that are not published", [] { run_written(false, false); }},
      {"descriptor", print_descriptor},
  };
  const std::map<std::string, Fault> faults = {
      {"mbarriers not published", Fault::barriers_not_published},
      {"no barrier after mbarriers", Fault::no_barrier_after_init},
      {"no wait for copies", Fault::no_wait_for_copies},
      {"no wait for space", Fault::no_wait_for_space},
      {"stage released early", Fault::released_early},
      {"stage released by one warp", Fault::released_by_one_warp},
      {"arrived too often", Fault::arrived_too_often},
      {"bytes not expected", Fault::bytes_not_expected},
      {"bytes never copied", Fault::bytes_never_copied},
      {"wrong parity", Fault::wrong_parity},
      {"registers not ordered", Fault::registers_not_ordered},
      {"sums touched early", Fault::sums_touched_early},
      {"products nobody waits for", Fault::never_waited},
      {"box nobody waits for", Fault::copy_nobody_waits_for},
      {"box misaligned", Fault::box_misaligned},
      {"operand misaligned", Fault::operand_misaligned},
      {"warps disagree", Fault::warps_disagree},
      {"half a warpgroup", Fault::half_a_warpgroup},
  };
  for (const auto& [name, fault] : faults) {
    cases[name] = with<kDeep, kDeep>(fault);
  }
  return cases;
}
