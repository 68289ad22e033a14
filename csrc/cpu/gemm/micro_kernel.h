// The micro-kernel of matrix multiplication: a tile of kRows x (kVectors
// registers of columns), accumulated in registers over the whole inner
// dimension. For each step it loads kVectors vectors of the right panel and
// broadcasts kRows lanes of the left one.
//
// Tile: as many accumulators as leave registers for the right panel's vectors
// and one broadcast. 32 registers (AVX-512, NEON): 12 x 2 = 24 of them; 16
// (AVX2, SSE): 6 x 2 = 12. Two independent chains of 12 or more hide the
// latency of 4 cycles of two multiply-add units.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"

namespace pkg::cpu {

inline constexpr int kTileRows = simd::kVectorRegisters >= 32 ? 12 : 6;
inline constexpr int kTileVectors = 2;

template <class Arithmetic>
inline constexpr int kTileColumns =
    kTileVectors * simd::kLanes<typename Arithmetic::Accumulator>;

// A left operand as cpu/gemm/packing.h packs it: strips of rows
// (for_each_strip), a step's lanes side by side.
template <class Lane>
struct PackedStrips {
  const Lane* data;

  static constexpr bool kPacked = true;
  template <int kRows>
  const Lane* strip(int64_t row, int64_t depth) const {
    return data + row * depth;
  }
  template <int kRows>
  Lane lane(const Lane* at, int row) const {
    return at[row];
  }
  template <int kRows>
  static constexpr int64_t kStep = kRows;
};

// A left operand that is read in place: each row's lanes are contiguous, though
// they may not be aligned.
template <class Lane>
struct RowsInPlace {
  const std::byte* data;
  int64_t row_bytes;

  static constexpr bool kPacked = false;
  template <int kRows>
  const std::byte* strip(int64_t row, int64_t /*depth*/) const {
    return data + row * row_bytes;
  }
  template <int kRows>
  Lane lane(const std::byte* at, int row) const {
    Lane value;
    std::memcpy(&value, at + row * row_bytes, sizeof(value));
    return value;
  }
  template <int kRows>
  static constexpr int64_t kStep = sizeof(Lane);
};

// A left operand of `depth` lanes as pack_rows (cpu/gemm/packing.h) packs it.
template <class Arithmetic>
auto packed_rows(const typename Arithmetic::Lane* packed, int64_t depth) {
  using Lane = typename Arithmetic::Lane;
  if constexpr (kUsesTiles<Arithmetic>) {
    return RowsInPlace<Lane>{reinterpret_cast<const std::byte*>(packed),
                             depth * int64_t{sizeof(Lane)}};
  } else {
    return PackedStrips<Lane>{packed};
  }
}

// A right operand of which the lanes of a step are contiguous over the columns
// of a panel: the matrix itself, or its panels as cpu/gemm/packing.h packs
// them. A packed operand may hold a narrower type than the arithmetic's lanes,
// which is converted when it is loaded.
template <class RightLane>
struct RightPanels {
  const RightLane* data;
  int64_t step_stride;   // from one step to the next
  int64_t panel_stride;  // from one panel to the next
};

// Lanes of the inner dimension that a tile sums at the most, and the values in
// them. Of float64, which is for results as exact as can be, half as many: that
// takes as many bytes. Tile registers have to have the panel in the L1 cache:
// n = 1024 on an Intel Xeon, depth 512 / 256 / 128: 593 / 719 / 766 GFLOP/s.
inline constexpr int64_t kBlockDepth = 512;
template <class Arithmetic>
inline constexpr int64_t kBlockValues =
    (kUsesTiles<Arithmetic> ? kBlockDepth / 4 : kBlockDepth) *
    Arithmetic::kDepth * int64_t{sizeof(float)} /
    int64_t{sizeof(typename Arithmetic::Accumulator)};
// Of how many values such a block should be a multiple.
template <class Arithmetic>
inline constexpr int64_t kBlockUnit =
    (kUsesTiles<Arithmetic> ? simd::kLanes<float> : 1) * Arithmetic::kDepth;
// Lanes that are summed one after the other; longer sums are made of such
// parts, since the rounding error of a chain of additions grows with its
// length, and twice as fast where the product is rounded too, for want of a
// fused multiply-add.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kLongestChain = kBlockDepth;
#else
inline constexpr int64_t kLongestChain = 64;
#endif

// What becomes of finished sums by default: they are kept as they are. Another
// epilogue changes a block of them in place: `rows` x `vectors` registers,
// whose first lane belongs to (row, column) of the result; of the last register
// of each row `tail` lanes exist.
struct KeepSums {
  template <class V>
  void operator()(int64_t /*row*/, int64_t /*column*/, V* /*sums*/,
                  int /*rows*/, int /*vectors*/, int /*tail*/) const {}
};

// Where the micro-kernel puts the sums of one tile, in whole registers: to
// `to`, added to those at `from` where it is not null. Both may be the same.
template <class Accumulator>
struct TileSums {
  const Accumulator* from;
  int64_t from_stride;
  Accumulator* to;
  int64_t to_stride;
  const Accumulator* corrections;  // of an arithmetic that has them, by row

  // Whether products must be added one after the other.
  static constexpr bool kInOrder = false;

  // The sums so far may lie in a distant cache.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t /*row*/,
                                       int64_t /*column*/) const {
    if (from != nullptr) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          __builtin_prefetch(from + r * from_stride + v * kLanes, 1);
        }
      }
    }
  }

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t /*row*/, int64_t /*column*/,
      Vector<Accumulator> (&sums)[kRows][kVectors], int /*tail*/) const {
    // Unrolled, or else the compiler keeps the sums in memory.
    const auto for_each = [&](const auto& body) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          body(r, v * kLanes, sums[r][v]);
        }
      }
    };
    if (from != nullptr) {
      for_each([&](int r, int lane, auto& value) {
        value += simd::load(from + r * from_stride + lane);
      });
    }
    for_each([&](int r, int lane, const auto& value) {
      simd::store(to + r * to_stride + lane, value);
    });
  }

 private:
  static constexpr int kLanes = simd::kLanes<Accumulator>;
};

// What becomes of the sums of a product. Long sums are made in steps, which lie
// in `partial` between them; after the last step they are given to the
// epilogue, rounded to Output, and stored. partial and output may be the same.
//
// The micro-kernel writes whole tiles where they belong; what is not whole, not
// of type Output, or not yet finished waits in `waiting`, a tile in the L1
// cache. So the micro-kernel knows neither Output nor the epilogue, and is
// compiled once for all operators.
template <class Accumulator, class Output, class Epilogue>
struct StoreSums {
  Accumulator* partial;
  int64_t partial_stride;
  bool first;
  bool last;
  Output* output;
  int64_t output_stride;
  const Epilogue& epilogue;
  const Accumulator* corrections = nullptr;  // of an arithmetic that has them

  static constexpr int kLanes = simd::kLanes<Accumulator>;
  using Tile = Vector<Accumulator>[kTileRows * kTileVectors];

  // Where the micro-kernel puts the tile of `rows` x `vectors` registers at
  // (row, column), of whose last register `tail` lanes exist.
  TileSums<Accumulator> place(int64_t row, int64_t column, int rows,
                              int vectors, int tail, Tile& waiting) const {
    Accumulator* const lanes = reinterpret_cast<Accumulator*>(waiting);
    const int64_t width = vectors * kLanes;
    TileSums<Accumulator> sums{nullptr, width, lanes, width, corrections};
    const bool whole = tail >= kLanes;
    if (!first && whole) {
      sums.from = partial + row * partial_stride + column;
      sums.from_stride = partial_stride;
    } else if (!first) {
      for (int r = 0; r < rows; ++r) {
        const Accumulator* from = partial + (row + r) * partial_stride + column;
        for (int v = 0; v < vectors; ++v) {
          waiting[r * vectors + v] =
              v < vectors - 1 ? simd::load(from + v * kLanes)
                              : simd::load_partial(from + v * kLanes, tail);
        }
      }
      sums.from = lanes;
    }
    if (whole && !last) {
      sums.to = partial + row * partial_stride + column;
      sums.to_stride = partial_stride;
    } else if constexpr (std::is_same_v<Accumulator, Output> && kKeeps) {
      if (whole) {
        sums.to = output + row * output_stride + column;
        sums.to_stride = output_stride;
      }
    }
    return sums;
  }

  // What is left to do with a tile that waits.
  [[gnu::noinline]] void finish(int64_t row, int64_t column, int rows,
                                int vectors, int tail, Tile& waiting) const {
    if (!last) {
      return store(partial + row * partial_stride + column, partial_stride,
                   rows, vectors, tail, waiting);
    }
    epilogue(row, column, waiting, rows, vectors, std::min(tail, kLanes));
    store(output + row * output_stride + column, output_stride, rows, vectors,
          tail, waiting);
  }

 private:
  static constexpr bool kKeeps = std::is_base_of_v<KeepSums, Epilogue>;

  template <class To>
  [[gnu::always_inline]] static void store(To* to, int64_t stride, int rows,
                                           int vectors, int tail,
                                           const Tile& waiting) {
    if (vectors == kTileVectors && tail >= kLanes) {
      for (int r = 0; r < rows; ++r, to += stride) {
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) {
          simd::store(to + v * kLanes, waiting[r * kTileVectors + v]);
        }
      }
      return;
    }
    const auto* from = waiting;
    for (int r = 0; r < rows; ++r, to += stride) {
      for (int v = 0; v < vectors - 1; ++v) {
        simd::store(to + v * kLanes, *from++);
      }
      simd::store_partial(to + (vectors - 1) * kLanes, *from++,
                          std::min(tail, kLanes));
    }
  }
};

namespace detail {

template <class Arithmetic, int kRows, int kVectors, class Left,
          class RightLane, class Store>
[[gnu::noinline]] void multiply_tile(int64_t depth, const Left& left,
                                     const RightLane* right,
                                     int64_t step_stride, int64_t row,
                                     int64_t column, int columns,
                                     const Store& store) {
  using Lane = typename Arithmetic::Lane;
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kLanes = simd::kLanes<Accumulator>;
  const int last = columns - (kVectors - 1) * kLanes;
  store.template prefetch<kRows, kVectors>(row, column);
  auto strip = left.template strip<kRows>(row, depth);
  // With few accumulators several steps go on side by side.
  constexpr int kChains =
      Store::kInOrder ? 1 : std::max(8 / (kRows * kVectors), 1);
  Vector<Accumulator> sums[kChains][kRows][kVectors] = {};
  if constexpr (Arithmetic::kCorrected) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[0][r][v] = simd::broadcast(store.corrections[row + r]);
      }
    }
  }
#if defined(PKG_HAS_TILES)
  if constexpr (kUsesTiles<Arithmetic> && kRowsOfTiles<kRows>) {
    const int64_t lanes = depth / kTileLanes * kTileLanes;
    if (lanes > 0) {
      multiply_by_tiles<Arithmetic>(lanes, strip, left.row_bytes, right,
                                    step_stride, sums[0]);
      strip += lanes * Left::template kStep<kRows>;
      right += lanes * step_stride;
      depth -= lanes;
    }
  }
#endif
  const auto step = [&](auto& sums_of_chain) {
    Vector<Lane> b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      b[v] = simd::load(right + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vector<Lane> a =
          simd::broadcast(left.template lane<kRows>(strip, r));
      for (int v = 0; v < kVectors; ++v) {
        sums_of_chain[r][v] =
            Arithmetic::multiply_add(a, b[v], sums_of_chain[r][v]);
      }
    }
    strip += Left::template kStep<kRows>;
    right += step_stride;
  };
  const auto sum_steps = [&](int64_t count) {
    int64_t k = 0;
#pragma GCC unroll 4
    for (; k + kChains <= count; k += kChains) {
      for (int chain = 0; chain < kChains; ++chain) {
        step(sums[chain]);
      }
    }
    for (; k < count; ++k) {
      step(sums[0]);
    }
    for (int chain = 1; chain < kChains; ++chain) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          sums[0][r][v] += sums[chain][r][v];
        }
      }
    }
  };
  if constexpr (kLongestChain < kBlockDepth) {
    Vector<Accumulator> totals[kRows][kVectors] = {};
    for (; depth > kLongestChain; depth -= kLongestChain) {
      sum_steps(kLongestChain);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          totals[r][v] += sums[0][r][v];
        }
      }
      std::memset(sums, 0, sizeof(sums));
    }
    sum_steps(depth);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[0][r][v] += totals[r][v];
      }
    }
  } else {
    sum_steps(depth);
  }
  store(row, column, sums[0], last);
}

}  // namespace detail

// The height of the next strip of `rows` rows: the tallest where they are as
// many, else one each of 8, 4, 2 and 1 where they fit. Heights in between would
// be faster by little and are much code.
template <int kTallest = kTileRows>
constexpr int strip_height(int64_t rows) {
  return rows >= kTallest
             ? kTallest
             : static_cast<int>(std::bit_floor(static_cast<uint64_t>(rows)));
}

// Calls body(row, height) for each strip of rows.
template <int kTallest = kTileRows, class Body>
[[gnu::always_inline]] inline void for_each_strip(int64_t rows,
                                                  const Body& body) {
  for (int64_t row = 0; row < rows;) {
    const int height = strip_height<kTallest>(rows - row);
    body(row, height);
    row += height;
  }
}

// Calls body(std::integral_constant<int, height>) for a strip's height.
template <int kTallest = kTileRows, class Body>
[[gnu::always_inline]] inline void with_strip_height(int height,
                                                     const Body& body) {
  if constexpr (kTallest == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (height == kTallest) {
    body(std::integral_constant<int, kTallest>{});
  } else {
    with_strip_height<strip_height(kTallest - 1)>(height, body);
  }
}

// The micro-kernel for a strip's height and one or kTileVectors registers of
// columns. Compiled in gemm_tiles_*.cpp, for the operands that are listed
// there.
template <class Arithmetic, class Left, class RightLane>
void multiply_any_tile(int height, int vectors, int64_t depth, const Left& left,
                       const RightLane* right, int64_t step_stride, int64_t row,
                       const TileSums<typename Arithmetic::Accumulator>& sums);

// The tile of `height` rows and at most kTileColumns `columns` at (row, column)
// of a product, stored.
template <class Arithmetic, class Left, class RightLane, class Store>
void multiply_stored_tile(int height, int columns, int64_t depth,
                          const Left& left, const RightLane* right,
                          int64_t step_stride, int64_t row, int64_t column,
                          const Store& store) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Accumulator>;
  typename Store::Tile waiting;
  const int vectors = columns > kLanes ? kTileVectors : 1;
  const int tail = columns - (vectors - 1) * kLanes;
  const auto sums = store.place(row, column, height, vectors, tail, waiting);
  multiply_any_tile<Arithmetic>(height, vectors, depth, left, right,
                                step_stride, row, sums);
  if (sums.to == reinterpret_cast<const void*>(waiting)) {
    store.finish(row, column, height, vectors, tail, waiting);
  }
}

// Multiplies rows by columns over `depth` lanes, so depth * kDepth values of
// the inner dimension. A right panel serves all strips of rows, which come from
// the L2 cache; but where all panels fit that cache too, a strip goes over them
// one after the other, so that the result is written along its rows.
template <class Arithmetic, class Left, class RightLane, class Store>
void multiply_panels(int64_t rows, int64_t columns, int64_t depth,
                     const Left& left, const RightPanels<RightLane>& right,
                     const Store& store) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  constexpr int64_t kSmall = 131072;
  const auto multiply_tile = [&](int64_t row, int height, int64_t column) {
    multiply_stored_tile<Arithmetic>(
        height, static_cast<int>(std::min(kColumns, columns - column)), depth,
        left, right.data + column / kColumns * right.panel_stride,
        right.step_stride, row, column, store);
  };
  if (depth * columns * static_cast<int64_t>(sizeof(RightLane)) <= kSmall) {
    for_each_strip(rows, [&](int64_t row, int height) {
      for (int64_t column = 0; column < columns; column += kColumns) {
        multiply_tile(row, height, column);
      }
    });
    return;
  }
  for (int64_t column = 0; column < columns; column += kColumns) {
    for_each_strip(rows, [&](int64_t row, int height) {
      multiply_tile(row, height, column);
    });
  }
}

}  // namespace pkg::cpu
