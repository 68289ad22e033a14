// Rows of activations as limbs (cpu/int4/limbs.h), chunk by chunk, with the
// sums of their groups: what the products by dot products of bytes begin with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/operands.h"
#include "cpu/int4/limbs.h"
#include "cpu/runtime/workspace.h"
#include "host/integer_math.h"

namespace pkg::cpu {

// In the thread's scratch memory, until the next of them.
template <int kLimbs>
class LimbRows {
 public:
  using Chunk = LimbChunk<kLimbs>;

  LimbRows(int64_t rows, int64_t columns, int64_t group_size)
      : rows_(rows),
        columns_(columns),
        group_blocks_(group_size / kTiledBlock),
        chunks_(ceil_div(columns, kChunkColumns)),
        groups_(columns / group_size),
        limbs_(Workspace::of_this_thread<Slot::Limbs>().template request<Chunk>(
            rows * chunks_)),
        block_sums_(
            Workspace::of_this_thread<Slot::BlockSums>()
                .template request<float>(rows * (chunks_ * kBlocks + groups_))),
        group_sums_(block_sums_ + rows * chunks_ * kBlocks) {}

  // Rows of `input` in the order of a weight's columns. False where block
  // floating point will not do for them.
  template <class T>
  bool write(const MatrixView<T>& input, const ChunkOrder& order) {
    for (int64_t row = 0; row < rows_; ++row) {
      float* of_row = block_sums_ + row * chunks_ * kBlocks;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const int64_t column = chunk * kChunkColumns;
        if (!write_limbs(input.at(row, column), input.column_stride,
                         std::min(kChunkColumns, columns_ - column), order,
                         limbs_[row * chunks_ + chunk],
                         of_row + chunk * kBlocks)) {
          return false;
        }
      }
      for (int64_t group = 0; group < groups_; ++group) {
        float sum = 0;
        for (int64_t block = 0; block < group_blocks_; ++block) {
          sum += of_row[group * group_blocks_ + block];
        }
        group_sums_[row * groups_ + group] = sum;
      }
    }
    return true;
  }

  int64_t rows() const { return rows_; }
  int64_t chunks() const { return chunks_; }
  int64_t groups() const { return groups_; }

  // A row's chunks lie side by side.
  const Chunk& at(int64_t row, int64_t chunk) const {
    return limbs_[row * chunks_ + chunk];
  }

  // Of a row's activations, by group.
  const float* group_sums(int64_t row) const {
    return group_sums_ + row * groups_;
  }

 private:
  static constexpr int64_t kBlocks = kChunkColumns / kTiledBlock;

  int64_t rows_;
  int64_t columns_;
  int64_t group_blocks_;
  int64_t chunks_;
  int64_t groups_;
  Chunk* limbs_;
  float* block_sums_;
  float* group_sums_;
};

}  // namespace pkg::cpu
