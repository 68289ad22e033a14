// How a product of float64 is made by tile registers: by residues.
//
// A tile multiplies bytes and adds exactly. So each line (row of A, column of
// B) is scaled by a power of two and rounded to integers, up to 2^58; of these
// the remainders for fifteen moduli are taken, bytes from -126 to 126; fifteen
// products of matrices of bytes are the product's remainders; and the Chinese
// remainder theorem makes the integer of them, below 2^117, that is the
// product, exactly (Ozaki, Uchino, Imamura: Ozaki scheme II, a GEMM-oriented
// emulation of floating-point matrix multiplication using an integer modular
// technique, 2025).
//
// What is lost is the rounding to integers. The scale is as large as the
// moduli allow: Cauchy and Schwarz bound a sum of products by the lines' norms,
// so that each line has one of up to 2^58. A value is then off by up to a half,
// and an element by half the sum of the magnitudes of its row and its column.
// Fused multiply-adds promise an error of K 2^-53 times S, the sum of the
// magnitudes of the products. Rows and columns whose large values meet small
// ones (or zeros) have a small S, of which that may be too much; so S is seen
// to be large enough, by a sixteenth product: of the magnitudes' leading seven
// bits, over some of the inner dimension. What is lost is at most half of what
// fused multiply-adds may lose, or else these make the element. Of normal
// values it is a tenth of what they do lose.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/scheme.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::residues {

using tiles::kStrip;
using tiles::kTileBytes;
using tiles::kTileRows;

// A strip's unit is that of bytes: 64 values of the inner dimension.
using Bytes = tiles::Int8By1;
inline constexpr int kValues = Bytes::kValues;
inline constexpr int64_t kUnitBytes = tiles::kUnitBytes<Bytes>;

// Coprime, and none above 253: a remainder that is off by one modulus' rounding
// still is a byte.
inline constexpr int kModuli = 15;
inline constexpr std::array<int, kModuli> kModulus = {
    253, 251, 249, 247, 245, 241, 239, 233, 229, 227, 223, 211, 199, 197, 193};
// Of packed lines: the remainders, and the leading bits of magnitudes.
inline constexpr int kPlanes = kModuli + 1;

// So long a sum of products of remainders is an integer in float32.
inline constexpr int64_t kMostValues = 1024;

// Not a type of the standard, but of both compilers that have tiles.
__extension__ typedef __int128 Int128;  // NOLINT(modernize-use-using)

// The remainder that is the least in magnitude.
constexpr int remainder_of(Int128 value, int modulus) {
  auto rest = static_cast<int>(value % modulus);
  rest += rest < 0 ? modulus : 0;
  return rest > modulus / 2 ? rest - modulus : rest;
}

constexpr Int128 product_of_moduli() {
  Int128 product = 1;
  for (const int modulus : kModulus) {
    product *= modulus;
  }
  return product;
}
inline constexpr Int128 kRange = product_of_moduli();

// An integer of up to 2^117 in two parts, the first a multiple of 2^75, so that
// sums of 15 products of it and a byte are exact in float64.
struct TwoParts {
  double first;
  double second;
};
constexpr TwoParts two_parts(Int128 value) {
  constexpr int kLowBits = 75;
  constexpr Int128 kHalf = Int128{1} << (kLowBits - 1);
  const Int128 high = (value + kHalf) >> kLowBits;
  const Int128 low = value - (high << kLowBits);
  return {static_cast<double>(static_cast<int64_t>(high)) * 0x1p75,
          static_cast<double>(low)};
}
inline constexpr TwoParts kRangeParts = two_parts(kRange);

// What a remainder is multiplied by: the number whose remainder is one for its
// modulus, and zero for the others.
constexpr TwoParts weight_of(int which) {
  const int modulus = kModulus[which];
  const Int128 others = kRange / modulus;
  for (int i = 1; i < modulus; ++i) {
    if (remainder_of(others * i, modulus) == 1) {
      const Int128 weight = others * i;
      return two_parts(weight > kRange / 2 ? weight - kRange : weight);
    }
  }
  return {};
}

// The norm that a scaled line may have: the square root of half the range, less
// a hundredth for rounding.
inline constexpr double kMostSquares = static_cast<double>(kRange) / 2 * 0.98;

}  // namespace pkg::cpu::residues

#endif
