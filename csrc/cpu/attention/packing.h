// Packing of attention's operands. Their rows are usually contiguous (the head
// size is the last dimension), so that queries, and keys as columns, are packed
// by transposing squares of registers: a fraction of a cycle for each element,
// where gathering them one by one takes a cycle or two.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/gemm/packing.h"
#include "cpu/simd/tile_registers.h"

namespace pkg::cpu::attention {

// A block of a left operand, in strips.
template <class Arithmetic, class Source>
void pack_strips(const MatrixView<Source>& left, int64_t rows, int64_t inner,
                 KGroupOf<Arithmetic>* packed) {
  if constexpr (kUsesTileRegisters<Arithmetic>) {
    const int64_t depth = depth_of<Arithmetic>(inner);
    pack_rows<Arithmetic>(left, rows, inner, packed);
    std::fill(packed + rows * depth, packed + padded_rows(rows) * depth,
              KGroupOf<Arithmetic>{0});
    return;
  }
  for_each_strip(rows, [&](int64_t row, int used, auto height) {
    pack_lines<Arithmetic>(left.at(row, 0), left.row_stride, left.column_stride,
                           used, height, inner,
                           packed + row * depth_of<Arithmetic>(inner));
  });
}

}  // namespace pkg::cpu::attention
