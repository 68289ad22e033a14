// The micro-kernel of tile registers: the sums of 32 x 32 elements of a result,
// in four tiles, over a block of the inner dimension whose operands
// cpu/tiles/pack_tiles.h has packed.
//
// It leaves its sums in the registers. The next call, or store_sums, stores
// each just before it uses the register again: waiting for the last products
// and storing them at the end of a call would cost 75 cycles of each.
//
// Intel Xeon (AMX), one core: a product of tiles takes 16 cycles, 4.2 ns,
// or 3.9 TFLOP/s in bfloat16, whatever the number of rows, and a load goes on
// beside it. Two by two tiles load one tile a product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/tiles/scheme.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#ifndef PKG_HAS_TILES
#define PKG_HAS_TILES 1
#endif

namespace pkg::cpu::tiles {

// A micro-tile of sums in memory: 32 rows of 32.
inline constexpr int64_t kSumsStride = kStrip;
inline constexpr int64_t kSumsCount = int64_t{kStrip} * kStrip;

// What goes on beside the products: one step after each product of parts of a
// unit, whose four tiles take 64 cycles. Work between one call and the next
// would not go on beside them: the processor looks ahead no further than it has
// tile registers to rename, about two such steps.
struct Work {
  void (*step)(void*);
  void* state;
};

// Where a call finds what, all aligned to cache lines.
template <class Accumulator>
struct MicroTile {
  const std::byte* left;
  const std::byte* right;
  // Where the sums that the registers hold from the call before go, and how
  // far its rows are from one another.
  Accumulator* previous;
  int64_t previous_stride;
  Work work;
};

// None.
inline constexpr Work kNoWork{[](void* /*state*/) {}, nullptr};

// The steps of a call.
template <class Scheme>
constexpr int64_t steps_of(int64_t units) {
  return units * kProductCount<Scheme>;
}

// The operand whose tiles are loaded past the L1 cache, so that the strip of
// the other, which many calls use, stays there: float32 by six products, n =
// 512, 1.66 times PyTorch's speed instead of 1.48.
enum class Streamed { Neither, Left, Right };

// Of row_tiles x column_tiles tiles, 1 or 2 of each, over `units` units.
template <class Scheme, Streamed streamed = Streamed::Neither>
void multiply_micro_tile(int row_tiles, int column_tiles, int64_t units,
                         const MicroTile<typename Scheme::Accumulator>& tile);

// Stores what the registers hold from the call before.
void store_sums(void* sums, int64_t stride = kSumsStride);

// Shapes this thread's tile registers: all of 16 rows of 64 bytes. Other
// libraries of the process shape them otherwise. 52 ns.
class Registers {
 public:
  Registers();
  ~Registers();
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
};

}  // namespace pkg::cpu::tiles

#endif
