// The packed operands of the backward pass. Each of Q, dO and K is in two
// products of different inner dimensions, so it is packed in two ways, V in
// one:
//
//               left operand      right operand      inner dimension
//   S           Q                 K^T                head size
//   dP          dO                V^T                value size
//   dQ          dS                K                  keys of the block
//   dV          P^T               dO                 rows of the block
//   dK          dS^T              Q                  rows of the block
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/finiteness.h"
#include "cpu/attention/packing.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// Q and dO of one head as left operands, block of rows by block of rows.
template <class Input>
struct PackedQueries {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  int64_t query_depth;
  int64_t grad_output_depth;

  explicit PackedQueries(const AttentionShape& shape)
      : query_depth(depth_of<Arithmetic>(shape.head_size)),
        grad_output_depth(depth_of<Arithmetic>(shape.value_size)) {}

  int64_t size(int64_t rows) const {
    return padded_rows(rows) * (query_depth + grad_output_depth);
  }
  KGroup* queries(KGroup* block) const { return block; }
  KGroup* grad_outputs(KGroup* block, int64_t rows) const {
    return block + padded_rows(rows) * query_depth;
  }
  // Whether a packed block and what the forward pass left of it are finite.
  bool finite(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
              int64_t rows, KGroup* block) const {
    const auto* statistics =
        problem.statistics + batch * problem.shape().rows + row;
    for (int64_t i = 0; i < rows; ++i) {
      if (std::isnan(statistics[i].origin) || std::isnan(statistics[i].delta)) {
        return false;
      }
    }
    return all_finite<Arithmetic>(block, size(rows));
  }
  void pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            int64_t rows, KGroup* block) const {
    const AttentionShape& shape = problem.shape();
    pack_strips<Arithmetic>(problem.forward.query.at(shape, batch).from(row, 0),
                            rows, shape.head_size, queries(block));
    pack_strips<Arithmetic>(problem.grad_output.at(shape, batch).from(row, 0),
                            rows, shape.value_size, grad_outputs(block, rows));
  }
};

// K^T and V^T of a block as right operands for the same products.
template <class Input>
struct PackedKeys {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  int64_t key_depth;
  int64_t value_depth;

  explicit PackedKeys(const AttentionShape& shape)
      : key_depth(depth_of<Arithmetic>(shape.head_size)),
        value_depth(depth_of<Arithmetic>(shape.value_size)) {}

  static constexpr int64_t kPaddedKeys = round_up(kKeyBlock, kNR<Arithmetic>);
  int64_t size() const { return kPaddedKeys * (key_depth + value_depth); }
  KGroup* keys(KGroup* block) const { return block; }
  KGroup* values(KGroup* block) const {
    return block + kPaddedKeys * key_depth;
  }
  void pack(const Problem<Input>& problem, int64_t batch, int64_t column,
            int64_t count, KGroup* block) const {
    const AttentionShape& shape = problem.shape;
    pack_columns<Arithmetic>(
        problem.key.at(shape, batch).from(column, 0).transposed(), count,
        shape.head_size, keys(block));
    pack_columns<Arithmetic>(
        problem.value.at(shape, batch).from(column, 0).transposed(), count,
        shape.value_size, values(block));
  }
  bool finite(KGroup* block, int64_t count) const {
    const int64_t padded = round_up(count, kNR<Arithmetic>);
    return all_finite<Arithmetic>(keys(block), padded * key_depth) &&
           all_finite<Arithmetic>(values(block), padded * value_depth);
  }
};

// What of one query head meets each of its keys, packed once for all blocks of
// keys: Q and dO as left operands, and again as right ones.
template <class Input>
struct PackedHead {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  static constexpr int64_t kColumns = kNR<Arithmetic>;
  PackedQueries<Input> left;
  int64_t key_stride;    // columns of the head size, filled up
  int64_t value_stride;  // columns of the value size, filled up
  int64_t block_size;    // k-groups of a block of rows
  int64_t size;          // k-groups of all

  explicit PackedHead(const AttentionShape& shape)
      : left(shape),
        key_stride(round_up(shape.head_size, kColumns)),
        value_stride(round_up(shape.value_size, kColumns)),
        block_size(
            round_up(left.size(kRowBlock) + (key_stride + value_stride) *
                                                depth_of<Arithmetic>(kRowBlock),
                     16)),
        size(ceil_div(shape.rows, kRowBlock) * block_size) {}

  KGroup* queries(KGroup* block) const { return left.queries(block); }
  KGroup* grad_outputs(KGroup* block, int64_t rows) const {
    return left.grad_outputs(block, rows);
  }
  KGroup* query_columns(KGroup* block) const {
    return block + left.size(kRowBlock);
  }
  KGroup* grad_output_columns(KGroup* block) const {
    return query_columns(block) + key_stride * depth_of<Arithmetic>(kRowBlock);
  }
  // Returns whether all of the block is finite, where keys are hidden; else
  // nobody needs to know.
  bool pack(const BackwardProblem<Input>& problem, int64_t batch, int64_t row,
            KGroup* block) const {
    const AttentionShape& shape = problem.shape();
    const int64_t rows = std::min(kRowBlock, shape.rows - row);
    left.pack(problem, batch, row, rows, block);
    pack_columns<Arithmetic>(
        problem.forward.query.at(shape, batch).from(row, 0), shape.head_size,
        rows, query_columns(block));
    pack_columns<Arithmetic>(problem.grad_output.at(shape, batch).from(row, 0),
                             shape.value_size, rows,
                             grad_output_columns(block));
    return problem.forward.hides_keys() &&
           left.finite(problem, batch, row, rows, block);
  }
};

}  // namespace pkg::cpu::attention
