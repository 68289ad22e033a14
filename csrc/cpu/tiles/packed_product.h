// Products by tile registers with a right operand that was packed beforehand
// (cpu/gemm/packed_product.h): panels of 32 columns.
//
// Those of bfloat16 are pairs of values side by side, 32 words for each pair:
// right tiles as cpu/tiles/pack_tiles.h would make them, read where they are.
// Only the last unit may be a part of one, and the block that it ends is copied
// and filled up with zeros. Those of float32 and float16 hold the values
// themselves, and are split into parts as any operand is; their columns lie
// side by side, so that at least nothing is transposed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/tiles/matrix_product.h"

namespace pkg::cpu::tiles {

#if defined(PKG_HAS_TILES)

// Blocks of a right operand whose panels are tiles.
template <class Scheme>
class PanelBlocks {
 public:
  struct Source {
    const std::byte* panels;
    int64_t panel_bytes;
  };

  static constexpr bool kMayStay = false;
  static constexpr int kUnitsTogether = 1;
  // Whether they are read where they are.
  static constexpr bool kInPlace = true;

  PanelBlocks(const Source& source, int64_t /*total_lines*/, int64_t inner,
              int64_t lines, int64_t units, bool /*keeps*/)
      : source_(source) {
    if (inner % Scheme::kValues != 0) {
      buffer_ =
          Workspace::of_this_thread<Slot::PackedRight>().request<std::byte>(
              packed_bytes<Scheme>(lines, units));
    }
  }

  void begin(int64_t line, int64_t lines, int64_t unit, int64_t units) {
    if (line == line_ && unit == unit_) {
      return;
    }
    line_ = line;
    unit_ = unit;
    const int64_t first = unit * kUnitBytes<Scheme>;
    const int64_t bytes = units * kUnitBytes<Scheme>;
    const std::byte* from =
        source_.panels + line / kStrip * source_.panel_bytes + first;
    if (first + bytes <= source_.panel_bytes) {
      block_ = {from, source_.panel_bytes};
      return;
    }
    std::byte* to = buffer_;
    block_ = {to, bytes};
    if (line == filled_line_) {
      return;  // only an operand's last units are copied
    }
    filled_line_ = line;
    const int64_t present = source_.panel_bytes - first;
    for (int64_t strip = 0; strip < strips_of(lines); ++strip, to += bytes) {
      std::memcpy(to, from + strip * source_.panel_bytes,
                  static_cast<size_t>(present));
      std::fill(to + present, to + bytes, std::byte{});
    }
  }

  PackedBlock packed() const { return block_; }
  int64_t left() const { return 0; }
  int64_t strips() const { return INT64_MAX; }
  void step(Range& /*range*/) {}

 private:
  Source source_;
  std::byte* buffer_ = nullptr;
  int64_t line_ = -1;
  int64_t unit_ = -1;
  int64_t filled_line_ = -1;  // the first of those that are in the buffer
  PackedBlock block_{};
};

namespace detail {

// Rows from which it is the faster way than vectors, which need no parts of the
// operand. Intel Xeon, 768 to 3072, milliseconds by vectors and by tiles:
// float32 16 rows 0.55 and 0.99, 64 rows 1.68 and 1.50; float16 0.48 and
// 0.60, 1.75 and 1.08. bfloat16 4096 to 4096, from memory, GB/s by vectors and
// by tiles: 8 rows 10.8 and 11.3, 12 11.1 and 11.2, 15 8.3 and 11.2.
template <class Input>
inline constexpr int64_t kLeastPackedRows = 7;
template <>
inline constexpr int64_t kLeastPackedRows<float> = 48;
template <>
inline constexpr int64_t kLeastPackedRows<Half> = 24;

}  // namespace detail

// Multiplies as cpu/gemm/packed_product.h does, whose panels of 32 columns are
// `panel_elements` apart; product.right is not used. Otherwise as multiply and
// multiply_parts in cpu/tiles/matrix_product.h.
template <class Input, class Output, class Epilogue, class Otherwise>
[[nodiscard]] bool multiply_packed(const Product<Input, Output>& product,
                                   const Input* packed, int64_t panel_elements,
                                   int64_t threads, const Epilogue& epilogue,
                                   const Otherwise& otherwise) {
  if (!detail::is_large_enough<Input>(product.rows, product.columns,
                                      product.inner,
                                      detail::kLeastPackedRows<Input>)) {
    return false;
  }
  const auto panels = [&](int64_t column) {
    return packed + column / kStrip * panel_elements;
  };
  return detail::with_scheme<Input>([&]<class Scheme>(Scheme) {
    const auto multiply = [&]<class Right>(std::type_identity<Right>,
                                           const auto& right) {
      detail::multiply_parts<Scheme>(
          product, threads, epilogue,
          [&](const auto& part, int64_t column, const auto& place) {
            return detail::multiply_alone<Scheme, Right>(
                part.left, right(column), part.rows, part.columns, part.inner,
                part.output, part.output_stride, place);
          },
          otherwise);
    };
    if constexpr (std::is_same_v<Input, BFloat16>) {
      using Right = PanelBlocks<Scheme>;
      multiply(std::type_identity<Right>{}, [&](int64_t column) {
        return typename Right::Source{
            reinterpret_cast<const std::byte*>(panels(column)),
            panel_elements * int64_t{sizeof(Input)}};
      });
    } else {
      using Right = OperandBlocks<Scheme, Side::Right>;
      multiply(std::type_identity<Right>{}, [&](int64_t column) {
        return
            typename Right::Source{{panels(column), 1, kStrip}, panel_elements};
      });
    }
  });
}

#else

template <class Input, class Output, class Epilogue, class Otherwise>
[[nodiscard]] bool multiply_packed(const Product<Input, Output>& /*product*/,
                                   const Input* /*packed*/,
                                   int64_t /*panel_elements*/,
                                   int64_t /*threads*/,
                                   const Epilogue& /*epilogue*/,
                                   const Otherwise& /*otherwise*/) {
  return false;
}

#endif

}  // namespace pkg::cpu::tiles
