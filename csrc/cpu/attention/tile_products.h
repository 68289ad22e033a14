// Products of packed strips by tile registers, micro-tile after micro-tile, and
// what becomes of the sums: they leave the registers when the next products
// begin, and are added to others beside the ones after these.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/scheme.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

// Packed strips of the two operands, over the same units.
struct TileOperands {
  const std::byte* left;
  const std::byte* right;
  int64_t units;
};
// What exists of a micro-tile.
struct MicroTileSize {
  int64_t rows;
  int64_t columns;
};

class TileProducts {
 public:
  static Scratch<float> scratch() { return {3 * tiles::kSumsCount}; }
  explicit TileProducts(float* scratch)
      : scratch_(scratch), last_{nowhere()}, stored_{nowhere()} {}

  // Stores the sums, 32 x 32 of them whatever exists, in rows of `stride`; they
  // are there after the next product.
  template <class Scheme>
  void store(const MicroTileSize& size, const TileOperands& operands, float* to,
             int64_t stride) {
    multiply<Scheme>(size, operands, {to, stride});
  }
  // Adds the sums times a factor, rows and whole registers of them that exist.
  template <class Scheme>
  void add(const MicroTileSize& size, const TileOperands& operands, float* to,
           int64_t stride, float factor) {
    turn_ = 1 - turn_;
    multiply<Scheme>(
        size, operands,
        {scratch_ + turn_ * tiles::kSumsCount, tiles::kSumsStride, to, stride,
         static_cast<int>(std::min<int64_t>(size.rows, tiles::kStrip)),
         tiles_of(size.columns), factor});
  }
  // All sums are where they belong after this.
  void finish() {
    add_rows(stored_.rows);
    tiles::store_sums(last_.stored, last_.stored_stride);
    stored_ = last_;
    add_rows(stored_.rows);
    last_ = nowhere();
  }

 private:
  // What becomes of a micro-tile's sums.
  struct Result {
    float* stored;
    int64_t stored_stride;
    float* sums = nullptr;  // that they are added to
    int64_t sums_stride = 0;
    int rows = 0;  // that are yet to be added
    int registers = 0;
    float factor = 1;
  };

  static int tiles_of(int64_t lines) {
    return lines > tiles::kTileRows ? 2 : 1;
  }
  Result nowhere() const {
    return {scratch_ + 2 * tiles::kSumsCount, tiles::kSumsStride};
  }

  template <class Scheme>
  void multiply(const MicroTileSize& size, const TileOperands& operands,
                const Result& result) {
    const auto steps =
        static_cast<int>(tiles::steps_of<Scheme>(operands.units));
    rows_a_step_ = ceil_div(stored_.rows, steps);
    tiles::multiply_micro_tile<Scheme>(tiles_of(size.rows),
                                       tiles_of(size.columns), operands.units,
                                       {operands.left,
                                        operands.right,
                                        last_.stored,
                                        last_.stored_stride,
                                        {&TileProducts::step, this}});
    add_rows(stored_.rows);
    stored_ = last_;
    last_ = result;
  }

  static void step(void* state) {
    auto& products = *static_cast<TileProducts*>(state);
    products.add_rows(std::min(products.rows_a_step_, products.stored_.rows));
  }
  void add_rows(int rows) {
    if (rows > 0) {
      stored_.registers == 2 ? add_registers<2>(rows) : add_registers<1>(rows);
    }
  }
  template <int kRegisters>
  void add_registers(int rows) {
    constexpr int kLanes = simd::kLanes<float>;
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kRegisters * kLanes; v += kLanes) {
        simd::store(stored_.sums + v,
                    simd::load(stored_.sums + v) +
                        simd::load(stored_.stored + v) * stored_.factor);
      }
      stored_.stored += tiles::kSumsStride;
      stored_.sums += stored_.sums_stride;
    }
    stored_.rows -= rows;
  }

  float* scratch_;
  Result last_;    // in the registers
  Result stored_;  // in memory, yet to be added
  int rows_a_step_ = 0;
  int turn_ = 0;
};

}  // namespace pkg::cpu::attention

#endif
