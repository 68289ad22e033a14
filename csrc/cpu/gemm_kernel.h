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

#include "gemm_arithmetic.h"
#include "simd.h"

namespace pkg::cpu {

inline constexpr int kTileRows = simd::kVectorRegisters >= 32 ? 12 : 6;
inline constexpr int kTileVectors = 2;

template <class Arithmetic>
inline constexpr int kTileColumns =
    kTileVectors * simd::kLanes<typename Arithmetic::Accumulator>;

// A left operand as gemm_pack.h packs it: strips of rows (for_each_strip), a
// step's lanes side by side.
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

// A right operand of which the lanes of a step are contiguous over the columns
// of a panel: the matrix itself, or its panels as gemm_pack.h packs them. A
// packed operand may hold a narrower type than the arithmetic's lanes, which is
// converted when it is loaded.
template <class RightLane>
struct RightPanels {
  const RightLane* data;
  int64_t step_stride;   // from one step to the next
  int64_t panel_stride;  // from one panel to the next
};

// Lanes of the inner dimension that a tile sums at the most.
inline constexpr int64_t kBlockDepth = 512;
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

// Where a tile's sums go. Long sums are made in steps, which lie in `partial`
// between them; the last step is given to the epilogue, rounded to Output, and
// stored. partial and output may be the same.
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

  // Whether products must be added one after the other.
  static constexpr bool kInOrder = false;

  // The partial sums may lie in a distant cache.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column) const {
    if (!first) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          __builtin_prefetch(
              partial + (row + r) * partial_stride + column + v * kLanes, 1);
        }
      }
    }
  }

  // The sums of a tile, of whose last register `tail` columns exist.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t row, int64_t column, Vector<Accumulator> (&sums)[kRows][kVectors],
      int tail) const {
    if (tail >= kLanes) {
      store<kRows, kVectors, true>(row, column, sums, kLanes);
    } else {
      store<kRows, kVectors, false>(row, column, sums, tail);
    }
  }

 private:
  static constexpr int kLanes = simd::kLanes<Accumulator>;

  // Unrolled, or else the compiler keeps the sums in memory.
  template <int kRows, int kVectors, bool kWhole>
  [[gnu::always_inline]] void store(
      int64_t row, int64_t column, Vector<Accumulator> (&sums)[kRows][kVectors],
      int tail) const {
    const auto for_each = [&](const auto& body) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          body(row + r, column + v * kLanes, sums[r][v],
               kWhole || v < kVectors - 1);
        }
      }
    };
    if (!first) {
      for_each([&](int64_t i, int64_t j, auto& value, bool whole) {
        const Accumulator* from = partial + i * partial_stride + j;
        value += whole ? simd::load(from) : simd::load_partial(from, tail);
      });
    }
    const auto finish = [&](int64_t i, int64_t j, const auto& value,
                            bool whole) {
      Output* to = output + i * output_stride + j;
      whole ? simd::store(to, value) : simd::store_partial(to, value, tail);
    };
    if (!last) {
      for_each([&](int64_t i, int64_t j, auto& value, bool whole) {
        Accumulator* to = partial + i * partial_stride + j;
        whole ? simd::store(to, value) : simd::store_partial(to, value, tail);
      });
    } else if constexpr (std::is_base_of_v<KeepSums, Epilogue>) {
      for_each(finish);
    } else {
      // On sums that wait in the L1 cache.
      Vector<Accumulator> tile[kRows][kVectors];
      for_each([&](int64_t i, int64_t j, const auto& value, bool) {
        tile[i - row][(j - column) / kLanes] = value;
      });
      epilogue(row, column, tile[0], kRows, kVectors, tail);
#pragma GCC unroll 1
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 1
        for (int v = 0; v < kVectors; ++v) {
          finish(row + r, column + v * kLanes, tile[r][v],
                 kWhole || v < kVectors - 1);
        }
      }
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

// Calls body(row, std::integral_constant<int, height>) for each strip of rows:
// as many as possible of kTileRows, then one each of 8, 4, 2 and 1 where they
// fit. Heights in between would be faster by little and are much code.
template <int kHeight = kTileRows, class Body>
[[gnu::always_inline]] inline void for_each_strip(int64_t rows,
                                                  const Body& body,
                                                  int64_t row = 0) {
  for (; row + kHeight <= rows; row += kHeight) {
    body(row, std::integral_constant<int, kHeight>{});
  }
  if constexpr (kHeight > 1) {
    constexpr int kNext = kHeight > 8 ? 8 : kHeight > 4 ? 4 : kHeight / 2;
    for_each_strip<kNext>(rows, body, row);
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
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Accumulator>;
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  constexpr int64_t kSmall = 131072;
  const auto multiply_tile = [&](int64_t row, auto height, int64_t column) {
    const int count = static_cast<int>(std::min(kColumns, columns - column));
    const RightLane* panel =
        right.data + column / kColumns * right.panel_stride;
    if (count > kLanes) {
      detail::multiply_tile<Arithmetic, height(), kTileVectors>(
          depth, left, panel, right.step_stride, row, column, count, store);
    } else {
      detail::multiply_tile<Arithmetic, height(), 1>(
          depth, left, panel, right.step_stride, row, column, count, store);
    }
  };
  if (depth * columns * static_cast<int64_t>(sizeof(RightLane)) <= kSmall) {
    for_each_strip(rows, [&](int64_t row, auto height) {
      for (int64_t column = 0; column < columns; column += kColumns) {
        multiply_tile(row, height, column);
      }
    });
    return;
  }
  for (int64_t column = 0; column < columns; column += kColumns) {
    for_each_strip(rows, [&](int64_t row, auto height) {
      multiply_tile(row, height, column);
    });
  }
}

}  // namespace pkg::cpu
