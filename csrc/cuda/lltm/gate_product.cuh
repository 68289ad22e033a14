// The product of a block of a step of lltm: the sums of all three gates of a
// tile of rows and hidden units, so that a thread holds what its states need.
//
// [h, x] are two operands, one after the other, and W's columns are parted as
// they are. The summed dimension is counted in panels, those of h first; a
// block may have some of them only.
//
// float16, bfloat16: tensor cores. A block of four warps has 64 rows and 64
// units, a warp all rows and 16 units: 64 x 48 sums, 96 registers of a thread.
// For 32 bytes of the summed dimension it loads seven times four matrices for
// 24 products: 28 cycles of a multiprocessor's shared memory, of which the
// products take 48 at the rate of an A100. A panel of 128 bytes is 448 such
// cycles, 256 more for the copies of its 32 KiB, and 768 of products. Warps of
// 32 x 32 units would load eight times; 64 rows x 32 units by warps of 32 x 16
// five times for 12, and copy 20 KiB for half the products. Tiles of 128 rows
// would copy less, and multiply zeros for the small batches that cells have.
// Two stages are 64 KiB: two blocks fit into a multiprocessor.
//
// float64: the tensor cores too, by panels of eight steps, 64 rows and 32 units
// of eight warps. A warp of 32 rows and 8 units loads seven numbers for 12
// products, 14 cycles for 48.
//
// float32: multiply-adds, by 128 threads. A thread's 8 x 12 sums need 20
// numbers of shared memory, by five loads, for 96 multiplications: 20 cycles of
// a multiprocessor's shared memory for 24 of an H200's multiply-adds. (256
// threads of 4 x 12 sums took 16 cycles for 12, which bound the loop to 75% of
// the rate.) Three blocks fit into a multiprocessor.
//
// A panel is 768 cycles of an A100's multiprocessor in each of them.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/stages.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/lltm/lltm.cuh"

namespace pkg::cuda {

template <class Element>
struct GateOperands {
  int64_t batch;
  int64_t units;
  int64_t depths[2];          // of h and of x
  MatrixOf<Element> rows[2];  // h and x
  MatrixOf<Element> weights;  // (gates, h and x)

  __device__ __forceinline__ PanelSource<Element> rows_of(int part) const {
    return {rows[part].data, batch, depths[part], rows[part].row_stride,
            rows[part].column_stride};
  }
  __device__ __forceinline__ PanelSource<Element> weights_of(int part,
                                                             int gate) const {
    return {weights.data + gate * units * weights.row_stride +
                part * depths[0] * weights.column_stride,
            units, depths[part], weights.row_stride, weights.column_stride};
  }

  __host__ __device__ int panels_of(int part, int depth) const {
    return static_cast<int>(tiles_of(depths[part], depth));
  }
};

// What a block computes of a step: from which row and unit on, and which of the
// panels of [h, x].
struct GatePiece {
  int64_t row_begin;
  int64_t unit_begin;
  int panel_begin;
  int panel_end;
};

// sums[gate] += a_panel^T b_panels[gate].
template <int kDepth, class Number, int kRows, int kUnits, int kThreadsDown,
          class PanelA, class PanelsB>
__device__ __forceinline__ void multiply_gates(
    Tile<Number, kRows, kUnits, GridThread<kThreadsDown>> (&sums)[kGates],
    PanelA&& a_panel, PanelsB&& b_panels) {
  using TileType = Tile<Number, kRows, kUnits, GridThread<kThreadsDown>>;
  const GridThread<kThreadsDown> thread(static_cast<int>(threadIdx.x));
  PKG_UNROLL_BY(2)  // as multiply_panel
  for (int step = 0; step < kDepth; ++step) {
    Number a[TileType::kThreadRows];
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      a[i] = a_panel[step][thread.row(i)];
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      Number b[TileType::kThreadColumns];
      PKG_UNROLL
      for (int j = 0; j < TileType::kThreadColumns; ++j) {
        b[j] = b_panels[gate][step][thread.column(j)];
      }
      PKG_UNROLL
      for (int i = 0; i < TileType::kThreadRows; ++i) {
        PKG_UNROLL
        for (int j = 0; j < TileType::kThreadColumns; ++j) {
          sums[gate].values[i][j] += a[i] * b[j];
        }
      }
    }
  }
}

// The same by tensor cores.
template <int kDepth, int kRows, int kUnits, int kWarpRows, int kWarpUnits,
          class PanelA, class PanelsB>
__device__ __forceinline__ void multiply_gates(
    Tile<double, kRows, kUnits,
         MmaThread<kRows, kUnits, kWarpRows, kWarpUnits>> (&sums)[kGates],
    PanelA&& a_panel, PanelsB&& b_panels) {
  using Places = MmaPlacesFloat64;
  const MmaThread<kRows, kUnits, kWarpRows, kWarpUnits> thread(
      static_cast<int>(threadIdx.x));
  constexpr int kRowParts = kWarpRows / Places::kRows;
  constexpr int kUnitParts = kWarpUnits / Places::kColumns;
  const MatrixPlace in_a = Places::a(thread.lane);
  const MatrixPlace in_b = Places::b(thread.lane);
  PKG_UNROLL
  for (int step = 0; step < kDepth; step += Places::kDepth) {
    double a[kRowParts];
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      a[i] = a_panel[step + in_a.column]
                    [thread.warp_row + i * Places::kRows + in_a.row];
    }
    PKG_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      PKG_UNROLL
      for (int j = 0; j < kUnitParts; ++j) {
        const double b =
            b_panels[gate][step + in_b.row]
                    [thread.warp_column + j * Places::kColumns + in_b.column];
        PKG_UNROLL
        for (int i = 0; i < kRowParts; i += 2) {
          auto& top = sums[gate].values[i];
          auto& bottom = sums[gate].values[i + 1];
          multiply_add(top[2 * j], top[2 * j + 1], bottom[2 * j],
                       bottom[2 * j + 1], a[i], a[i + 1], b);
        }
      }
    }
  }
}

// By panels of the accumulator's type, as cuda/gemm/tile_product.cuh.
template <class Element, int kUnitCount, class Owner>
struct GatePanels {
  static constexpr int kRows = 64;
  static constexpr int kUnits = kUnitCount;
  static constexpr int kDepth = 8;
  static constexpr int kThreads = Owner::kThreads;
  static constexpr int kSharedBytes = 0;  // beyond what is declared
  // In a multiprocessor.
  static constexpr int kBlocks = kThreads == 128 ? 3 : 2;
  static constexpr int64_t kLeastPanels = 4;
  using Number = Accumulator<Element>;
  using Sums = Tile<Number, kRows, kUnits, Owner>;
  template <int kOuter>
  using Stage =
      PanelStage<Element, kOuter, kDepth, PanelPlaces::kept, kThreads>;

  // sums[gate] += the products of the piece. On return every thread is done
  // with the shared memory.
  __device__ __forceinline__ static void multiply(
      Sums (&sums)[kGates], const GateOperands<Element>& operands,
      const GatePiece& piece) {
    PKG_SHARED(Number, a_panels, [2][kDepth][kRows + kPanelPadding]);
    PKG_SHARED(Number, b_panels, [2][kGates][kDepth][kUnits + kPanelPadding]);
    Stage<kRows> a_stage;
    Stage<kUnits> b_stages[kGates];
    const int input_begin = operands.panels_of(0, kDepth);
    const auto fetch = [&](int panel) {
      const int part = panel >= input_begin ? 1 : 0;
      const int64_t begin = int64_t{panel - part * input_begin} * kDepth;
      a_stage.fetch(operands.rows_of(part), piece.row_begin, begin);
      PKG_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        b_stages[gate].fetch(operands.weights_of(part, gate), piece.unit_begin,
                             begin);
      }
    };
    const auto store = [&](int to) {
      a_stage.store(a_panels[to]);
      PKG_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        b_stages[gate].store(b_panels[to][gate]);
      }
    };
    fetch(piece.panel_begin);
    store(0);
    __syncthreads();
    int current = 0;
    for (int next = piece.panel_begin + 1; next <= piece.panel_end; ++next) {
      if (next < piece.panel_end) {
        fetch(next);
      }
      multiply_gates<kDepth>(sums, a_panels[current], b_panels[current]);
      if (next < piece.panel_end) {
        store(1 - current);
      }
      __syncthreads();
      current = 1 - current;
    }
  }
};

// By the tensor cores, as cuda/gemm/mma_product.cuh.
template <class Element>
class GateMma {
  static constexpr int kWarpUnits = 16;
  static constexpr int kStages = 2;

 public:
  static constexpr int kRows = 64;
  static constexpr int kUnits = 64;
  using Thread = MmaThread<kRows, kUnits, kRows, kWarpUnits>;
  static constexpr int kThreads = Thread::kThreads;
  using Operand = OperandTile<Element, kRows, kThreads>;
  static_assert(kRows == kUnits);
  static constexpr int kDepth = Operand::kDepth;
  static constexpr int kStageElements = (1 + kGates) * Operand::kElements;
  static constexpr int kSharedBytes =
      kStages * kStageElements * static_cast<int>(sizeof(Element));
  static constexpr int kBlocks = 2;
  static constexpr int64_t kLeastPanels = 2;
  using Sums = Tile<float, kRows, kUnits, Thread>;

  // As of GatePanels.
  __device__ __forceinline__ static void multiply(
      Sums (&sums)[kGates], const GateOperands<Element>& operands,
      const GatePiece& piece) {
    const SharedSpan<Element> memory = dynamic_shared<Element>();
    const int input_begin = operands.panels_of(0, kDepth);
    const int first_part = piece.panel_begin >= input_begin ? 1 : 0;
    Slices copied(operands, piece, first_part);
    Slices multiplied = copied;
    pass_through_stages<kStages>(
        piece.panel_begin, piece.panel_end,
        [&](int panel, int stage) {
          if (panel == input_begin) {
            copied = Slices(operands, piece, 1);
          }
          const int begin = panel < input_begin ? 0 : input_begin;
          copied.load(stage_of(memory, stage), int64_t{panel - begin} * kDepth);
        },
        [&](int panel, int stage) {
          if (panel == input_begin) {
            multiplied = Slices(operands, piece, 1);
          }
          multiplied.multiply(sums, stage_of(memory, stage));
        });
  }

 private:
  __device__ __forceinline__ static SharedSpan<Element> stage_of(
      const SharedSpan<Element>& memory, int stage) {
    return memory.part(stage * kStageElements, kStageElements);
  }

  // A panel: a slice of the rows, then one of each gate's weights.
  class Slices {
   public:
    __device__ __forceinline__ Slices(const GateOperands<Element>& operands,
                                      const GatePiece& piece, int part)
        : rows_(operands.rows_of(part), piece.row_begin, Thread().warp_row,
                true),
          weights_{of_gate(operands, piece, part, 0),
                   of_gate(operands, piece, part, 1),
                   of_gate(operands, piece, part, 2)} {}

    __device__ __forceinline__ void load(const SharedSpan<Element>& to,
                                         int64_t depth_begin) const {
      rows_.load(slice(to, 0), depth_begin);
      PKG_UNROLL
      for (int gate = 0; gate < kGates; ++gate) {
        weights_[gate].load(slice(to, 1 + gate), depth_begin);
      }
    }

    __device__ __forceinline__ void multiply(
        Sums (&sums)[kGates], const SharedSpan<Element>& from) const {
      constexpr int kSteps = kDepth / Operand::kStep;
      uint32_t a[2][kRows / 16][4];
      uint32_t b[2][4];
      const auto load_rows = [&](int step) {
        PKG_UNROLL
        for (int i = 0; i < kRows / 16; ++i) {
          rows_.fragments(slice(from, 0), i, step, a[step % 2][i]);
        }
      };
      const auto load_weights = [&](int turn) {
        const int gate = turn % kGates;
        weights_[gate].fragments(slice(from, 1 + gate), 0, turn / kGates,
                                 b[turn % 2]);
      };
      load_rows(0);
      load_weights(0);
      PKG_UNROLL
      for (int turn = 0; turn < kSteps * kGates; ++turn) {
        const int step = turn / kGates;
        if (turn + 1 < kSteps * kGates) {
          load_weights(turn + 1);
        }
        if (turn % kGates == 0 && step + 1 < kSteps) {
          load_rows(step + 1);
        }
        multiply_columns<Element>(sums[turn % kGates], a[step % 2], b[turn % 2],
                                  0);
      }
    }

   private:
    __device__ __forceinline__ static Operand of_gate(
        const GateOperands<Element>& operands, const GatePiece& piece, int part,
        int gate) {
      return Operand(operands.weights_of(part, gate), piece.unit_begin,
                     Thread().warp_column, false);
    }
    __device__ __forceinline__ static SharedSpan<Element> slice(
        const SharedSpan<Element>& stage, int index) {
      return stage.part(index * Operand::kElements, Operand::kElements);
    }

    Operand rows_;
    Operand weights_[kGates];
  };
};

template <class Element>
struct GateProduct : GateMma<Element> {};
template <>
struct GateProduct<float> : GatePanels<float, 64, GridThread<8>> {};
template <>
struct GateProduct<double> : GatePanels<double, 32, MmaThread<64, 32, 32, 8>> {
};

}  // namespace pkg::cuda
