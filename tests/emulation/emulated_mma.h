// The tensor cores' instructions of csrc/cuda/device/mma.cuh: each is one
// exchange of a warp, whose last lane multiplies for all.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "cuda/device/mma_places.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda/device/words.cuh"
#include "cuda_emulator.h"

namespace pkg::emulation {

// What a lane gives to the emulated instruction, and takes from it.
template <class Operand, class Sum, int kAWords, int kBWords, int kSums>
struct MmaLane {
  Operand a[kAWords];
  Operand b[kBWords];
  Sum sums[kSums];
};

// The emulator's own loops, not what is checked: a sanitizer's checks of them
// were a third of the time of all products.
#define PKG_NOT_SANITIZED __attribute__((no_sanitize("address", "undefined")))

// An operand's element, as the tensor cores read it.
template <class Element, class Sum>
PKG_NOT_SANITIZED Sum element_of_operand(uint32_t word, int index) {
  if constexpr (std::is_same_v<Element, cuda::Tf32>) {
    return cuda::float_of_bits(word & ~cuda::kBelowTf32);
  } else {
    return cuda::convert<Sum>(cuda::element_of_word<Element>(word, index));
  }
}

// How the products of a row and a column are added to a sum: one by one, each
// sum rounded.
struct Rounded {
  template <class Sum, int kDepth>
  PKG_NOT_SANITIZED static Sum sum(Sum sum, const Sum (&row)[kDepth],
                                   const Sum (&column)[kDepth]) {
    for (int k = 0; k < kDepth; ++k) {
      sum += row[k] * column[k];
    }
    return sum;
  }
};

// As the tensor cores add them where it matters how exact that is: exact
// products and the sum are cut to 24 bits below the largest of them and added,
// and what comes of it is cut to float32. (Fasi, Higham, Mikaitis and Pranesh,
// "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021, who found this
// for the V100 and some bits more for the A100.)
struct Truncated {
  template <int kDepth>
  PKG_NOT_SANITIZED static float sum(float sum, const float (&row)[kDepth],
                                     const float (&column)[kDepth]) {
    double terms[kDepth + 1];
    terms[kDepth] = sum;
    double largest = std::fabs(terms[kDepth]);
    for (int k = 0; k < kDepth; ++k) {
      terms[k] = double{row[k]} * double{column[k]};
      largest = std::fmax(largest, std::fabs(terms[k]));
    }
    double plain = 0;
    for (const double term : terms) {
      plain += term;
    }
    if (!std::isfinite(plain) || largest == 0) {
      return static_cast<float>(plain);
    }
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
    double total = 0;
    for (const double term : terms) {
      total += std::trunc(term / unit) * unit;
    }
    const auto nearest = static_cast<float>(total);
    const bool is_beyond = std::fabs(double{nearest}) > std::fabs(total);
    return is_beyond && std::isfinite(nearest) ? std::nextafter(nearest, 0.0f)
                                               : nearest;
  }
};

// Each lane's sums, with the product of the matrices added.
template <class Places, class Add, class Lane, class A, class B>
PKG_NOT_SANITIZED void deal_out_sums(Lane (&lanes)[32], const A& a, const B& b,
                                     LaneBytes (&taken)[32]) {
  count_product();
  for (int lane = 0; lane < 32; ++lane) {
    auto& sums = lanes[lane].sums;
    for (int index = 0; index < static_cast<int>(std::size(sums)); ++index) {
      const cuda::MatrixPlace at = Places::sum(lane, index);
      const auto& row = a[at.row];
      using Sum = std::decay_t<decltype(sums[0])>;
      Sum column[Places::kDepth];
      for (int k = 0; k < Places::kDepth; ++k) {
        column[k] = b[k][at.column];
      }
      sums[index] = Add::sum(sums[index], row, column);
    }
    memcpy(taken[lane], sums, sizeof(sums));
  }
}

// The matrices are put together from the lanes' parts, multiplied, and the sums
// dealt out, all by what the places say.
template <class Element, class Sum>
PKG_NOT_SANITIZED void combine_mma(const LaneBytes (&given)[32],
                                   LaneBytes (&taken)[32]) {
  using Places = cuda::MmaPlaces<sizeof(Element)>;
  using Lane = MmaLane<uint32_t, Sum, 4, 2, 4>;
  Sum a[Places::kRows][Places::kDepth];
  Sum b[Places::kDepth][Places::kColumns];
  Lane lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    memcpy(&lanes[lane], given[lane], sizeof(Lane));
    for (int element = 0; element < Places::kInWord; ++element) {
      for (int word = 0; word < 4; ++word) {
        const cuda::MatrixPlace at = Places::a(lane, word, element);
        a[at.row][at.column] =
            element_of_operand<Element, Sum>(lanes[lane].a[word], element);
      }
      for (int word = 0; word < 2; ++word) {
        const cuda::MatrixPlace at = Places::b(lane, word, element);
        b[at.row][at.column] =
            element_of_operand<Element, Sum>(lanes[lane].b[word], element);
      }
    }
  }
  constexpr bool kTruncates = std::is_same_v<Element, cuda::Tf32>;
  using Add = std::conditional_t<kTruncates, Truncated, Rounded>;
  deal_out_sums<Places, Add>(lanes, a, b, taken);
}

template <class Element, class Sum>
void multiply_add(Sum& c0, Sum& c1, Sum& c2, Sum& c3, const uint32_t (&a)[4],
                  const uint32_t* b, Site site = Site::current()) {
  const MmaLane<uint32_t, Sum, 4, 2, 4> lane = {
      {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c0, c1, c2, c3}};
  Sum sums[4];
  collective(~0u, &lane, sizeof(lane), sums, sizeof(sums),
             &combine_mma<Element, Sum>, site);
  c0 = sums[0];
  c1 = sums[1];
  c2 = sums[2];
  c3 = sums[3];
}

inline void combine_mma_float64(const LaneBytes (&given)[32],
                                LaneBytes (&taken)[32]) {
  using Places = cuda::MmaPlacesFloat64;
  using Lane = MmaLane<double, double, 1, 1, 2>;
  double a[Places::kRows][Places::kDepth];
  double b[Places::kDepth][Places::kColumns];
  Lane lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    memcpy(&lanes[lane], given[lane], sizeof(Lane));
    const cuda::MatrixPlace in_a = Places::a(lane);
    const cuda::MatrixPlace in_b = Places::b(lane);
    a[in_a.row][in_a.column] = lanes[lane].a[0];
    b[in_b.row][in_b.column] = lanes[lane].b[0];
  }
  deal_out_sums<Places, Rounded>(lanes, a, b, taken);
}

inline void multiply_add(double& c0, double& c1, double a, double b,
                         Site site = Site::current()) {
  const MmaLane<double, double, 1, 1, 2> lane = {{a}, {b}, {c0, c1}};
  double sums[2];
  collective(~0u, &lane, sizeof(lane), sums, sizeof(sums), &combine_mma_float64,
             site);
  c0 = sums[0];
  c1 = sums[1];
}

}  // namespace pkg::emulation
