// The contract of the matrix product C = A B: its five loops, and what each
// part of it is given and owes. The parts are templates; the concepts below are
// their constraints.
//
// The loops are those of Goto and van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication" (doi 10.1145/1356052.1356053), in the arrangement of
// BLIS (doi 10.1145/2764454). MR, NR, KC, MC and NC are in cpu/gemm/blocking.h.
//
//   loop                                                 what lies where then
//   5  over N by NC     columns of B and C               (a thread's rectangle)
//   4  over K by KC     pack KC x NC of B                B's block: share of L3
//   3  over M by MC     pack MC x KC of A                A's block: L2
//   2  over NC by NR    a micro-panel of B, KC x NR      L1, or L2 (KC is deep)
//   1  over MC by MR    a micro-panel of A, MR x KC      streamed from L2
//      micro-kernel     over KC: MR x NR sums            registers
//
//              NR   NR   NR                 a micro-panel of B: for each
//            +----+----+----+               k-group NR elements in a row
//         KC | B0 | B1 | B2 |   B packed
//            +----+----+----+                 k-group 0: b0 b1 ... b(NR-1)
//    KC                                       k-group 1: b0 b1 ... b(NR-1)
//   +----+   +----+----+----+                 ...        (zeros behind N)
//   | A0 | MR|    |    |    |   C, of MR x
//   +----+   +----+----+----+   NR micro-   and one of A: for each k-group
//   | A1 | MR|    |    |    |   tiles       the rows of the strip: MR, or
//   +----+   +----+----+----+               8, 4, 2, 1 of the last rows
//
// Words. k-group: consecutive values of K that one element of a packed operand
// holds, since dot-product instructions take so many at once: 1 of float and
// double, 2 of bfloat16, 2 or 4 of int8. Depth: a length of K in k-groups.
// Element: of a SIMD register. Strip: the rows of C of one micro-panel of A.
// Micro-tile: strip x NR of C, or of one register where N leaves no more. Edge
// tile: a micro-tile whose last register reaches beyond C. Compensation: what
// each row's sums start from where B is packed with an offset.
//
// Products that need other loops keep the parts: gemm.h packs both operands, or
// reads them where they lie (in_place.h); packed_product.h has B packed for
// good; cpu/int4/many_rows.h unpacks int4 into B's micro-panels;
// cpu/lltm/product.h packs a micro-panel at a time; cpu/attention multiplies
// strips of weights where the softmax left them. few_rows.h does without them.
#pragma once

#include <concepts>
#include <cstdint>

#include "cpu/simd/simd.h"

namespace pkg::cpu {

using simd::Vector;

// An arithmetic (arithmetic.h): how an element of packed A and one of packed B
// are multiplied and added to a sum.
//   given   registers of k-groups, and one of sums
//   owes    sum + the products of each k-group's values. `Right` is the same
//           arithmetic as B is packed for it. Where kCompensated, compensate()
//           gives what a row's sums have to start from, over all k-groups of A.
//           Where instructions multiply a register by a lane of another, as
//           NEON's do, also multiply_add_lane<lane>() and multiply_add() of one
//           k-group of A
template <class A>
concept ProductArithmetic =
    sizeof(typename A::KGroup) == sizeof(typename A::Accumulator) &&
    A::kKGroupSize >= 1 &&
    requires(Vector<typename A::KGroup> k_groups,
             Vector<typename A::Accumulator> sum) {
      typename A::Right;
      { A::kCompensated } -> std::convertible_to<bool>;
      {
        A::multiply_add(k_groups, k_groups, sum)
      } -> std::same_as<decltype(sum)>;
    } &&
    (!A::kCompensated || requires(Vector<typename A::KGroup> k_groups,
                                  Vector<typename A::Accumulator> sum) {
      { A::compensate(sum, k_groups) } -> std::same_as<decltype(sum)>;
    });

// Packing (packing.h) of matrices of Source.
//   given   a block of any strides
//   owes    micro-panels as drawn above, K and N filled up with zeros; for tile
//           registers A row after row instead (packed_rows reads either)
// load_k_groups reads a register of k-groups of one row of A or column of B,
// interleave one k-group of a register of neighbouring ones.
template <class A, class Source>
concept PacksFrom =
    ProductArithmetic<A> &&
    requires(const Source* line, const Source* const (&lines)[A::kKGroupSize],
             Vector<typename A::KGroup> k_groups) {
      { A::load_k_groups(line) } -> std::same_as<decltype(k_groups)>;
      { A::interleave(lines) } -> std::same_as<decltype(k_groups)>;
    };

// Where the micro-kernel reads A: packed, in place, or as attention has it.
//   given   the strip's first row and the depth that was packed
//   owes    a cursor, strip(); the k-group of each of its rows, k_group(); how
//           far the cursor moves to the next k-group, kStep. For an arithmetic
//           that uses tile registers also row_bytes, between rows in memory;
//           k_groups(), where k-groups of neighbouring rows lie side by side
template <class Left, class KGroup>
concept LeftMicroPanels =
    requires(const Left& left, int64_t row, int64_t depth) {
      {
        left.template k_group<1>(left.template strip<1>(row, depth), 0)
      } -> std::same_as<KGroup>;
      left.template strip<1>(row, depth) + Left::template kStep<1>;
    };

// What the micro-kernel does with finished sums: MicroTileSums of store_sums.h
// puts them where C lies, attention's and int4's scale or weigh them.
//   given   a micro-tile's sums in registers, its place, and how many elements
//           of each row's last register exist
//   owes    prefetch() what it will read, before the loop over K. kInOrder:
//           that products are added one after the other, in a single
//           accumulator
template <class Store, class Accumulator>
concept MicroTileStore =
    requires(const Store& store, int64_t row, int64_t column,
             Vector<Accumulator> (&sums)[1][1], int tail) {
      { Store::kInOrder } -> std::convertible_to<bool>;
      store.template prefetch<1, 1>(row, column);
      store(row, column, sums, tail);
    };

// An epilogue.
//   given   `rows` x `vectors` registers of finished sums of the accumulator's
//           type, whose first element is that of (row, column) of the result;
//           of the last register of each row `tail` elements exist
//   owes    the block changed in place; it is rounded and stored after that
template <class Epilogue, class Accumulator>
concept ProductEpilogue =
    requires(const Epilogue& epilogue, int64_t row, int64_t column,
             Vector<Accumulator>* sums, int rows, int vectors,
             int tail) { epilogue(row, column, sums, rows, vectors, tail); };

// What becomes of a product's sums, from block to block of K (StoreSums in
// store_sums.h).
//   given   a micro-tile's place and size, its depth, and scratch for an edge
//           tile
//   owes    place(): where the micro-kernel reads and writes whole registers,
//           C itself, which is prefetched, or the scratch; finish(): the
//           scratch brought to C
template <class Store>
concept ProductStore = requires(const Store& store, int64_t row, int64_t column,
                                int rows, int vectors, int tail, int64_t depth,
                                typename Store::EdgeTile& scratch) {
  store.place(row, column, rows, vectors, tail, depth, scratch);
  store.finish(row, column, rows, vectors, tail, scratch);
};

}  // namespace pkg::cpu
