// What becomes of a product's sums: where the micro-kernel writes them, and the
// way of edge tiles, other output types and epilogues through scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/blocking.h"
#include "cpu/gemm/contract.h"
#include "cpu/runtime/cache.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu {

// The epilogue of a product whose sums are kept as they are.
struct KeepSums {
  template <class V>
  void operator()(int64_t /*row*/, int64_t /*column*/, V* /*sums*/,
                  int /*rows*/, int /*vectors*/, int /*tail*/) const {}
};

// Where the micro-kernel puts the sums of one micro-tile, in whole registers:
// to `to`, added to those at `from` where it is not null. Both may be the same.
template <class Accumulator>
struct MicroTileSums {
  const Accumulator* from;
  int64_t from_stride;
  Accumulator* to;
  int64_t to_stride;
  const Accumulator* compensation;  // of an arithmetic that has it, by row

  static constexpr bool kInOrder = false;

  // StoreSums did, where it pays: done here, products without it lost 1 to 2 %.
  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t /*row*/,
                                       int64_t /*column*/) const {}

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t /*row*/, int64_t /*column*/,
      Vector<Accumulator> (&sums)[kRows][kVectors], int /*tail*/) const {
    // Unrolled, or else the compiler keeps the sums in memory.
    const auto for_each = [&](const auto& body) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          body(r, v * kLanes, sums[r][v]);
        }
      }
    };
    if (from != nullptr) {
      for_each([&](int r, int column, auto& value) {
        value += simd::load(from + r * from_stride + column);
      });
    }
    for_each([&](int r, int column, const auto& value) {
      simd::store(to + r * to_stride + column, value);
    });
  }

 private:
  static constexpr int kLanes = simd::kLanes<Accumulator>;
};

// What becomes of the sums of a product. Those over a K longer than KC are made
// block by block and lie in `partial` between them; after the last block they
// are given to the epilogue, rounded to Output, and stored. partial and output
// may be the same.
//
// The micro-kernel writes whole micro-tiles where they belong. Edge tiles, and
// any of which the epilogue or another type is to be made, go through scratch
// in the L1 cache. So the micro-kernel knows neither Output nor the epilogue,
// and is compiled once for all operators.
template <class Accumulator, class Output, class Epilogue>
  requires ProductEpilogue<Epilogue, Accumulator>
struct StoreSums {
  Accumulator* partial;
  int64_t partial_stride;
  bool first;
  bool last;
  Output* output;
  int64_t output_stride;
  const Epilogue& epilogue;
  const Accumulator* compensation = nullptr;  // of an arithmetic that has it
  bool is_distant = false;  // the result, which is larger than L2

  static constexpr int kLanes = simd::kLanes<Accumulator>;
  // Of the largest micro-tile of any arithmetic.
  using EdgeTile = Vector<Accumulator>[std::max(
      kMR * kNRVectors,
      WideDouble::kMicroTileRows* WideDouble::kMicroTileVectors)];

  // Where the micro-kernel puts the micro-tile of `rows` x `vectors` registers
  // at (row, column), of whose last register `tail` elements exist. It adds up
  // `depth` k-groups, in which time sums that lie in a distant cache come.
  MicroTileSums<Accumulator> place(int64_t row, int64_t column, int rows,
                                   int vectors, int tail, int64_t depth,
                                   EdgeTile& scratch) const {
    Accumulator* const elements = reinterpret_cast<Accumulator*>(scratch);
    const int64_t width = vectors * kLanes;
    MicroTileSums<Accumulator> sums{nullptr, width, elements, width,
                                    compensation};
    const bool whole = tail >= kLanes;
    if (!first && whole) {
      sums.from = partial + row * partial_stride + column;
      sums.from_stride = partial_stride;
    } else if (!first) {
      for (int r = 0; r < rows; ++r) {
        const Accumulator* from = partial + (row + r) * partial_stride + column;
        for (int v = 0; v < vectors; ++v) {
          scratch[r * vectors + v] =
              v < vectors - 1 ? simd::load(from + v * kLanes)
                              : simd::load_partial(from + v * kLanes, tail);
        }
      }
      sums.from = elements;
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
    if (depth >= (is_distant ? kLeastOfDistant : kLeastPrefetched)) {
      prefetch(sums, row, column, rows, vectors, elements);
    }
    return sums;
  }

  // Brings a micro-tile from the scratch to where it belongs.
  [[gnu::noinline]] void finish(int64_t row, int64_t column, int rows,
                                int vectors, int tail,
                                EdgeTile& scratch) const {
    if (!last) {
      return store(partial + row * partial_stride + column, partial_stride,
                   rows, vectors, tail, scratch);
    }
    epilogue(row, column, scratch, rows, vectors, std::min(tail, kLanes));
    store(output + row * output_stride + column, output_stride, rows, vectors,
          tail, scratch);
  }

 private:
  static constexpr bool kKeeps = std::is_base_of_v<KeepSums, Epilogue>;
  // K-groups of a micro-tile that takes longer than its lines to arrive. Those
  // of L2 are there before, and asking for them takes 1 % of 64 k-groups (int8,
  // n = 256); with those from further away 128 x 256 x 32768 is 1.2 times as
  // fast.
  static constexpr int64_t kLeastPrefetched = 128;
  static constexpr int64_t kLeastOfDistant = 48;

  // Into L2: the rows of a result often lie in the same set of L1, which
  // operands fill besides. Zen 4, n = 1024, against none: float32 and float64 3
  // % faster, int8, which writes as many bytes for a quarter of the
  // multiply-adds, 5 %; brought into L1 0, 0 and 4 %.
  [[gnu::always_inline]] void prefetch(const MicroTileSums<Accumulator>& sums,
                                       int64_t row, int64_t column, int rows,
                                       int vectors,
                                       const Accumulator* scratch) const {
    const auto bring = [vectors](const auto* to, int64_t stride, int count) {
      if (vectors <= kNRVectors) {
        prefetch_registers<PrefetchTo::L2, kNRVectors>(to, stride, count);
      } else {
        prefetch_registers<PrefetchTo::L2, WideDouble::kMicroTileVectors>(
            to, stride, count);
      }
    };
    const bool is_added = sums.from != nullptr && sums.from != scratch;
    if (is_added) {
      bring(sums.from, sums.from_stride, rows);
    }
    if (last && !(is_added && is_in_place())) {
      bring(output + row * output_stride + column, output_stride, rows);
    } else if (!is_added && sums.to != scratch) {
      bring(sums.to, sums.to_stride, rows);
    }
  }

  // Whether the sums lie where the result will.
  bool is_in_place() const {
    return static_cast<const void*>(partial) == output;
  }

  template <int kVectors, class To>
  [[gnu::always_inline]] static void store_whole(To* to, int64_t stride,
                                                 int rows,
                                                 const EdgeTile& scratch) {
    for (int r = 0; r < rows; ++r, to += stride) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        simd::store(to + v * kLanes, scratch[r * kVectors + v]);
      }
    }
  }

  template <class To>
  [[gnu::always_inline]] static void store(To* to, int64_t stride, int rows,
                                           int vectors, int tail,
                                           const EdgeTile& scratch) {
    if (vectors == kNRVectors && tail >= kLanes) {
      return store_whole<kNRVectors>(to, stride, rows, scratch);
    }
    if (vectors == WideDouble::kMicroTileVectors && tail >= kLanes) {
      return store_whole<WideDouble::kMicroTileVectors>(to, stride, rows,
                                                        scratch);
    }
    const auto* from = scratch;
    for (int r = 0; r < rows; ++r, to += stride) {
      for (int v = 0; v < vectors - 1; ++v) {
        simd::store(to + v * kLanes, *from++);
      }
      simd::store_partial(to + (vectors - 1) * kLanes, *from++,
                          std::min(tail, kLanes));
    }
  }
};

}  // namespace pkg::cpu
