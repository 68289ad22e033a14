// The sizes of the product's loops (cpu/gemm/contract.h draws them), for every
// instruction set and arithmetic. docs/tuning/gemm.md has the measurements;
// each decision and the figure that made it stand beside the table.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"

namespace pkg::cpu {

// As the compiler was told; pkg/_build_flags.py has the flags.
enum class InstructionSet { Baseline, Neon, Avx2, Avx512, Avx512Bf16, Amx };

inline constexpr InstructionSet kInstructionSet =
#if defined(__aarch64__)
    InstructionSet::Neon;
#elif defined(PKG_HAS_TILES)
    InstructionSet::Amx;
#elif defined(__AVX512BF16__)
    InstructionSet::Avx512Bf16;
#elif defined(__AVX512F__)
    InstructionSet::Avx512;
#elif defined(__AVX2__)
    InstructionSet::Avx2;
#else
    InstructionSet::Baseline;
#endif

struct Blocking {
  InstructionSet set;
  int mr;         // MR: rows of a micro-tile
  int nr_single;  // NR: its columns where sums are float or int32,
  int nr_double;  // and double
  // KC, in k-groups (values: 1, 2 or 4 times as many), of operands in float
  // (float16 too, and bfloat16 without its dot products), double, and dot
  // products of bfloat16 and int8.
  int64_t kc_float, kc_double, kc_dot;
  int64_t mc;  // MC: rows of A that are packed at a time
  int64_t nc;  // NC: columns of B that are packed at a time
  // Accumulation length: k-groups that are summed one after the other; parts
  // are summed first. The rounding error of a sum grows with it, and twice as
  // fast where products are rounded too, for want of a fused multiply-add.
  int64_t accumulation_length;
};

// MR x NR: as many accumulators as leave registers for the vectors of B and one
// broadcast of A: 12 x 2 = 24 of 32, 6 x 2 = 12 of 16. So many are independent
// of one another, which hides a latency of 4 cycles of two multiply-add units.
//
// KC: 512 k-groups of 4 bytes. Zen 4, float32, n = 1024, GFLOP/s of a peak of
// 118: 102 with 192, 105 with 256, 106 with 384, 108 with 512, 108 with 768,
// 109 with 1024: the micro-panel of B need not lie in L1, rarely reading and
// writing sums matters more; and longer sums are less exact. Double 256 (as
// many bytes): 1.07 times as fast as 512 at n = 1024 on an Intel Xeon. Tile
// registers do want the micro-panel in L1: 128 766, 256 719, 512 593 GFLOP/s, n
// = 1024.
//
// Sums: all 512 of a block in one accumulation had 1.42 times torch.mm's error
// at n = 512 (root of mean squares; 1.7 at the worst), parts of 256 have 1.0
// for 1 to 2.7 % of the time, parts of 128 0.72 for 5 % (Xeon, AVX-512).
//
// MC x KC fills 240 KiB of L2 with 64-byte vectors; KC x NC 2 MiB of a share of
// L3, and a micro-panel of B, 64 KiB, comes from L2 once for each strip.
// clang-format off
inline constexpr Blocking kBlockings[] = {
    //                           MR  NR f32 f64   KC f32  f64  dot   MC    NC  sums
    {InstructionSet::Baseline,    6,      8,  4,     512, 256, 512,  60, 1024, 64},
    {InstructionSet::Neon,       12,      8,  4,     512, 256, 512, 120, 1024, 256},
    {InstructionSet::Avx2,        6,     16,  8,     512, 256, 512,  60, 1024, 256},
    {InstructionSet::Avx512,     12,     32, 16,     512, 256, 512, 120, 1024, 256},
    {InstructionSet::Avx512Bf16, 12,     32, 16,     512, 256, 512, 120, 1024, 256},
    {InstructionSet::Amx,        12,     32, 16,     512, 256, 128, 120, 1024, 256},
};
// clang-format on

constexpr const Blocking& blocking_of(InstructionSet set) {
  const Blocking* found = kBlockings;
  while (found->set != set) {
    ++found;
  }
  return *found;
}
inline constexpr const Blocking& kBlocking = blocking_of(kInstructionSet);

inline constexpr int kMR = kBlocking.mr;
inline constexpr int64_t kMC = kBlocking.mc;
inline constexpr int64_t kNC = kBlocking.nc;
inline constexpr int64_t kAccumulationLength = kBlocking.accumulation_length;
// NR in registers.
inline constexpr int kNRVectors = 2;

// float64 by micro-tiles of 8 x 3 registers and twice as many rows of A, for
// Intel's two ports of 512 bits, which load two registers a cycle, and 2 MiB of
// L2. Intel Xeon with AMX, torch.mm's time over ours by 12 x 2 and so: n = 256
// 0.95 and 1.00, 512 0.93 and 0.99, 1024 0.94 and 0.96, 2048 0.90 and 0.92.
struct WideDouble : Floating<double> {
  using Right = WideDouble;
  static constexpr int kMicroTileRows = 8;
  static constexpr int kMicroTileVectors = 3;
  static constexpr int64_t kRowsAtATime = 240;
};

// The arithmetic of products that gemm.h or packed_product.h makes. Attention
// and lltm have strips of their own and keep the table's micro-tile.
template <class T>
struct ProductArithmeticOf : ArithmeticOf<T> {};
#if defined(PKG_HAS_TILES)
template <>
struct ProductArithmeticOf<double> {
  using type = WideDouble;
};
#endif

namespace detail {

// The table's, of all arithmetics that have none of their own.
struct CommonMicroTile {
  static constexpr int kMicroTileRows = kMR;
  static constexpr int kMicroTileVectors = kNRVectors;
  static constexpr int64_t kRowsAtATime = kMC;
};
template <class Arithmetic>
concept HasMicroTile = requires { Arithmetic::kMicroTileRows; };
template <class Arithmetic>
using MicroTileOf =
    std::conditional_t<HasMicroTile<Arithmetic>, Arithmetic, CommonMicroTile>;

}  // namespace detail

// Of an arithmetic: MR, NR in registers and in columns, and MC.
template <class Arithmetic>
inline constexpr int kMicroTileRows =
    detail::MicroTileOf<Arithmetic>::kMicroTileRows;
template <class Arithmetic>
inline constexpr int kMicroTileVectors =
    detail::MicroTileOf<Arithmetic>::kMicroTileVectors;
template <class Arithmetic>
inline constexpr int kNR = kMicroTileVectors<Arithmetic> *
                           simd::kLanes<typename Arithmetic::Accumulator>;
template <class Arithmetic>
inline constexpr int64_t kRowsAtATime =
    detail::MicroTileOf<Arithmetic>::kRowsAtATime;

// KC in k-groups, and in values of the inner dimension.
template <class Arithmetic>
inline constexpr int64_t kKCDepth =
    sizeof(typename Arithmetic::Accumulator) == 8 ? kBlocking.kc_double
    : Arithmetic::kKGroupSize > 1                 ? kBlocking.kc_dot
                                                  : kBlocking.kc_float;
template <class Arithmetic>
inline constexpr int64_t kKC = kKCDepth<Arithmetic> * Arithmetic::kKGroupSize;
// Of how many values a block of K should be a multiple: a tile register's rows.
template <class Arithmetic>
inline constexpr int64_t kKCUnit =
    (kUsesTileRegisters<Arithmetic> ? simd::kLanes<float> : 1) *
    Arithmetic::kKGroupSize;

// Whether sums of a block of K are made of parts. With fused multiply-adds
// float alone: the blocks of double are as short as it takes, and sums of dot
// products are as exact as half precision and integers need.
inline constexpr bool kFusesMultiplyAdd =
#if defined(__FMA__) || defined(__aarch64__)
    true;
#else
    false;
#endif
template <class Arithmetic>
inline constexpr bool kSumsInParts =
    kAccumulationLength < kKCDepth<Arithmetic> &&
    (!kFusesMultiplyAdd || std::is_same_v<typename Arithmetic::KGroup, float>);

static_assert(kMR * kNRVectors + kNRVectors + 1 <= simd::kVectorRegisters);
static_assert(kBlocking.nr_single == kNRVectors * simd::kLanes<float>);
static_assert(kMC % kMR == 0 &&
              WideDouble::kRowsAtATime % WideDouble::kMicroTileRows == 0);
static_assert(kBlocking.nr_double == kNRVectors * simd::kLanes<double>);
static_assert(kNC % kBlocking.nr_single == 0);

}  // namespace pkg::cpu
