// The last step of a product by tile registers: rows of a micro-tile's sums,
// finished and stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/store_sums.h"
#include "cpu/runtime/cache.h"
#include "cpu/tiles/scheme.h"

namespace pkg::cpu::tiles {

// An epilogue that has kStores has stored the sums itself.
template <class Accumulator, class Output, class Epilogue>
class StoreRows {
 public:
  StoreRows(Output* output, int64_t stride, const Epilogue& epilogue)
      : output_(output), stride_(stride), epilogue_(epilogue) {}

  // Brings lines of the result from (row, column) on into L2.
  template <int kRows>
  void prefetch(int64_t row, int64_t column) const {
    if constexpr (!kStoresItself) {
      const Output* at = output_ + row * stride_ + column;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r, at += stride_) {
        prefetch_bytes<PrefetchTo::L2>(at, kStrip * int64_t{sizeof(Output)});
      }
    }
    if constexpr (requires {
                    epilogue_.prefetch(row, column, kRows, kStrip);
                  }) {
      epilogue_.prefetch(row, column, kRows, kStrip);
    }
  }

  // The micro-tile's rows from `first` on, up to kRows of them that exist, of
  // `columns` columns; (row, column) is where its first element belongs.
  // `added`: sums to be added, or null.
  template <int kRows>
  void store(const Accumulator* sums, const Accumulator* added, int64_t row,
             int64_t column, int64_t first, int rows, int columns) const {
    const int present =
        static_cast<int>(std::min<int64_t>(kRows, rows - first));
    sums += first * kStrip;
    added = added == nullptr ? nullptr : added + first * kStrip;
    row += first;
    if (present == kRows && columns == kStrip) {
      if (kKeepsSums && added == nullptr) {
        store_as_they_are<kRows>(sums, output_ + row * stride_ + column);
      } else {
        store_vectors<kRows, 2>(sums, added, row, column, kRows, kLanes);
      }
    } else if (present > 0 && columns > kLanes) {
      store_vectors<kRows, 2>(sums, added, row, column, present,
                              columns - kLanes);
    } else if (present > 0) {
      store_vectors<kRows, 1>(sums, added, row, column, present, columns);
    }
  }

 private:
  static constexpr int kLanes = simd::kLanes<Accumulator>;
  static constexpr bool kStoresItself = requires { Epilogue::kStores; };
  static constexpr bool kKeepsSums = std::is_base_of_v<KeepSums, Epilogue>;

  // Tiles make zeros of denormal numbers, so none has to be looked for.
  template <int kRows>
  [[gnu::always_inline]] void store_as_they_are(const Accumulator* sums,
                                                Output* to) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r, sums += kStrip, to += stride_) {
      const auto first = simd::load(sums);
      const auto second = simd::load(sums + kLanes);
      if constexpr (std::is_same_v<Output, simd::BFloat16>) {
        simd::store_normal_pair(to, first, second);
      } else {
        simd::store_pair(to, first, second);
      }
    }
  }

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void store_vectors(const Accumulator* sums,
                                            const Accumulator* added,
                                            int64_t row, int64_t column,
                                            int rows, int tail) const {
    simd::Vector<Accumulator> values[kRows * kVectors];
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = r * kStrip + v * kLanes;
        auto value = simd::load(sums + at);
        if (added != nullptr) {
          value += simd::load(added + at);
        }
        values[r * kVectors + v] = value;
      }
    }
    epilogue_(row, column, values, rows, kVectors, tail);
    if constexpr (kStoresItself) {
      return;
    }
    Output* to = output_ + row * stride_ + column;
    for (int r = 0; r < rows; ++r, to += stride_) {
      if (kVectors == 2 && tail == kLanes) {
        simd::store_pair(to, values[r * kVectors], values[r * kVectors + 1]);
        continue;
      }
      for (int v = 0; v < kVectors; ++v) {
        if (v < kVectors - 1 || tail == kLanes) {
          simd::store(to + v * kLanes, values[r * kVectors + v]);
        } else {
          simd::store_partial(to + v * kLanes, values[r * kVectors + v], tail);
        }
      }
    }
  }

  Output* output_;
  int64_t stride_;
  const Epilogue& epilogue_;
};

}  // namespace pkg::cpu::tiles
