// Products of a block by warpgroups: the tensor cores of compute capability 9.0
// at their full rate, from operands that the copy engine brings.
//
// Of a block's three warpgroups the third is the producer: one of its threads
// asks for the boxes of a stage as soon as nobody reads what was there. The
// other two are consumers, of 64 rows of the tile each: they wait until a
// stage's bytes are there, begin its four products, wait for those of the stage
// before and release that. So there is always a product on its way, and the
// stages run on from one tile to the next: while the consumers store a tile,
// the first stages of the next one are filled.
//
// A stage is 128 bytes of the summed dimension of the tile's 128 rows and 256
// columns: 48 KiB, of which four fit. For each, a multiprocessor's tensor cores
// take 2 x 4 x 128 cycles; shared memory gives them 2 x 4 x (2 + 8) KiB and
// takes 48 KiB from the copies, at 128 bytes a cycle 640 + 384 cycles: both are
// 1024, so that nothing of the rate is lost, which is 989 TFLOP/s of bfloat16
// on an H100 or H200. 128 columns, for products of few tiles, have six stages
// of 32 KiB, 512 cycles of the tensor cores, 384 + 256 of shared memory: 80%.
//
// From the L2 cache a multiprocessor reads 48 KiB in these 1024 cycles, all 132
// of them 6336 bytes a cycle. NVIDIA gives no figure for the H100's cache; at
// the A100's 5120 it is what bounds the product, at 81%. Two blocks that share
// the columns of their tiles and have them copied once (a cluster) would need
// two thirds. (On an H100 the cache does not bound it: n = 4096 of
// bfloat16 took 180 us, 763 TFLOP/s, tensor cores 87 % and L2 cache 63 % busy,
// at 1.61 GHz; cuBLAS was as fast.)
//
// Algorithm: that of CUTLASS's persistent warp-specialised kernels with
// cooperating consumers (media/docs/cpp/efficient_gemm.md there).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// The types that tensor cores multiply for a warpgroup, and this does.
template <class Element>
constexpr bool kHasWarpgroupProduct =
    std::is_same_v<Element, bfloat16> || std::is_same_v<Element, float16> ||
    std::is_same_v<Element, int8_t> || std::is_same_v<Element, Tf32>;

// Which stage is next, and the parity of the phase that its barriers are in:
// producer and consumers each count on through all tiles of the block.
template <int kStages>
struct StageTurn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where the boxes of an operand come from: its map, and whether their lines are
// steps of the summed dimension or rows (columns).
struct BoxSource {
  const TensorMap* map;
  bool lines_are_steps;
  int outer_begin;
  int matrix;
};

template <class Element, int kTileColumns>
class WarpgroupProduct {
 public:
  static constexpr int kRows = 128;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kDepth = 128 / sizeof(Element);
  static constexpr int kStages = kColumns == 256 ? 4 : 6;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  // Of a box, which has as many lines of either operand, whatever they are.
  static constexpr int kBoxLines = 64;
  static constexpr int kBoxBytes = 128 * kBoxLines;
  static constexpr int kStageBytes = (kRows + kColumns) / kBoxLines * kBoxBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // A multiprocessor's 65536, less for who only asks for copies.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(kWarpgroup * kProducerRegisters +
                    kConsumers * kConsumerRegisters <=
                65536);

  using Turn = StageTurn<kStages>;
  using Thread = MmaThread<kRows, kColumns, 16, kColumns>;
  using Sums = Tile<Accumulator<Element>, kRows, kColumns, Thread>;
  static_assert(Thread::kThreads == kConsumers);

  // `full` is over when a stage's bytes are there, `empty` when all warps that
  // multiply are done with them.
  __device__ __forceinline__ WarpgroupProduct(const Mbarriers& full,
                                              const Mbarriers& empty)
      : memory_(dynamic_shared<Element>()), full_(full), empty_(empty) {}

  // By all threads; the barriers are made when it returns.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        full_.init(stage, 1);
        empty_.init(stage, kConsumers / 32);
      }
      publish_mbarriers();
    }
    __syncthreads();
  }

  // Copies panels of both operands, from depth_begin on, in turn with
  // `multiply`. By one thread of the producer.
  __device__ __forceinline__ void copy(const BoxSource& a, const BoxSource& b,
                                       int depth_begin, int panels,
                                       Turn& turn) const {
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      copy_stage(a, b, depth_begin + panel * kDepth, 0, turn);
    }
  }

  // sums = A B over so many panels. By all consumers.
  template <Major kMajorA, Major kMajorB>
  __device__ __forceinline__ void multiply(Sums& sums, int panels,
                                           Turn& turn) const {
    hold_sums(sums.values);
    int before = 0;
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      const int stage = next_stage(turn);
      begin_products<kMajorA, kMajorB>(sums, stage, stage, panel > 0);
      commit_products();
      wait_for_products<1>();
      if (panel > 0) {
        release(before);
      }
      before = stage;
    }
    wait_for_products<0>();
    release(before);
    hold_sums(sums.values);
  }

 protected:
  // Copies a panel of both operands, of a group of their maps' matrices, to the
  // next stage.
  __device__ __forceinline__ void copy_stage(const BoxSource& a,
                                             const BoxSource& b, int depth,
                                             int group, Turn& turn) const {
    // None has been used before the first round, which waits for the phase
    // before phase 0.
    empty_.wait(turn.stage, turn.parity ^ 1);
    full_.arrive_and_expect(turn.stage, kStageBytes);
    copy_boxes<kRows>(a, depth, group, turn.stage, 0);
    copy_boxes<kColumns>(b, depth, group, turn.stage, kRows / kBoxLines);
    turn.advance();
  }

  // Begins the products of the rows of one stage by the columns of another, or
  // of the same.
  template <Major kMajorA, Major kMajorB>
  __device__ __forceinline__ void begin_products(Sums& sums, int a_stage,
                                                 int b_stage, bool add) const {
    constexpr int kSteps = 128 / 32;
    const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
    const WarpgroupOperand a(
        memory_, a_stage * kStageElements + warpgroup * kBoxElements,
        kBoxBytes);
    const WarpgroupOperand b(
        memory_, b_stage * kStageElements + kRows / kBoxLines * kBoxElements,
        kBoxBytes);
    order_registers();
    PKG_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      begin_product<Element, kMajorA, kMajorB>(
          sums.values, a.at(step * kStepBytes<kMajorA>),
          b.at(step * kStepBytes<kMajorB>), add || step > 0);
    }
  }

  // Waits until the next stage's bytes are there.
  __device__ __forceinline__ int next_stage(Turn& turn) const {
    const int stage = turn.stage;
    full_.wait(stage, turn.parity);
    turn.advance();
    return stage;
  }

  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) {
      empty_.arrive(stage);
    }
  }

 private:
  static constexpr int kBoxElements = kBoxBytes / sizeof(Element);
  static constexpr int kStageElements = kStageBytes / sizeof(Element);

  // The 64 rows or columns after 64 others, to the boxes from `box` on.
  template <int kOuter>
  __device__ __forceinline__ void copy_boxes(const BoxSource& from, int depth,
                                             int group, int stage,
                                             int box) const {
    PKG_UNROLL
    for (int i = 0; i < kOuter / kBoxLines; ++i) {
      const int outer = from.outer_begin + i * kBoxLines;
      copy_box(memory_, stage * kStageElements + (box + i) * kBoxElements,
               *from.map, from.lines_are_steps ? outer : depth,
               from.lines_are_steps ? depth : outer, from.matrix, group, full_,
               stage);
    }
  }

  // Where lines are steps, one of 32 bytes of the summed dimension is 16 lines.
  template <Major kMajor>
  static constexpr int kStepBytes = kMajor == Major::depth ? 32 : 16 * 128;

  SharedSpan<Element> memory_;
  const Mbarriers& full_;
  const Mbarriers& empty_;
};

}  // namespace pkg::cuda
