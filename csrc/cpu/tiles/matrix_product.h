// Which products of matrices tile registers make, by which scheme, and what
// becomes of operands that they are not right for.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/tiles/precision.h"
#include "cpu/tiles/product.h"

namespace pkg::cpu::tiles {

#if defined(PKG_HAS_TILES)

namespace detail {

// Whether it is the faster way: below this, packing costs more than it saves.
inline bool is_large_enough(int64_t rows, int64_t columns, int64_t inner) {
  constexpr int64_t kLeastLines = 16;
  constexpr int64_t kLeastInner = 16;
  constexpr double kLeastWork = 48.0 * 48 * 48;
  return rows >= kLeastLines && columns >= kLeastLines &&
         inner >= kLeastInner &&
         static_cast<double>(rows) * static_cast<double>(columns) *
                 static_cast<double>(inner) >=
             kLeastWork;
}

template <class Scheme, class Input, class Output, class Epilogue>
void multiply(const cpu::Product<Input, Output>& product, int64_t threads,
              const Epilogue& epilogue) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  const auto multiply_part = [&](int64_t row, int64_t rows, int64_t column,
                                 int64_t columns) {
    const auto part = product.part(row, rows, column, columns);
    const cpu::detail::EpilogueFrom<Epilogue> place{epilogue, row, column};
    bool is_right;
    {
      const Registers registers;
      is_right = Product<Scheme, Output, cpu::detail::EpilogueFrom<Epilogue>>(
                     part.left, part.right, rows, columns, product.inner,
                     part.output, part.output_stride, place)
                     .run();
    }
    if constexpr (Scheme::kHasRange) {
      if (!is_right) {
        cpu::detail::multiply_alone<Arithmetic>(part, row, column, epilogue);
      }
    }
  };
  threads = cpu::detail::useful_threads(product.rows, product.columns,
                                        product.inner, threads);
  if (threads == 1) {
    return multiply_part(0, product.rows, 0, product.columns);
  }
  cpu::detail::for_each_rectangle<void>(product.rows, product.columns, kStrip,
                                        kStrip, threads, multiply_part);
}

}  // namespace detail

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// these operands, and nothing was done.
template <class Input, class Output, class Epilogue>
bool multiply(const cpu::Product<Input, Output>& product, int64_t threads,
              const Epilogue& epilogue) {
  if (!detail::is_large_enough(product.rows, product.columns, product.inner)) {
    return false;
  }
  if constexpr (std::is_same_v<Input, float>) {
    switch (float32_products()) {
      case Float32Products::Six:
        detail::multiply<Float32By6>(product, threads, epilogue);
        return true;
      case Float32Products::Three:
        detail::multiply<Float32By3>(product, threads, epilogue);
        return true;
      case Float32Products::One:
        detail::multiply<Float32By1>(product, threads, epilogue);
        return true;
      case Float32Products::None:
        return false;
    }
    return false;
  } else if constexpr (std::is_same_v<Input, Half>) {
    detail::multiply<Float16By4>(product, threads, epilogue);
    return true;
  } else if constexpr (std::is_same_v<Input, BFloat16>) {
    detail::multiply<Bfloat16By1>(product, threads, epilogue);
    return true;
  } else if constexpr (std::is_same_v<Input, int8_t>) {
    detail::multiply<Int8By1>(product, threads, epilogue);
    return true;
  } else {
    return false;
  }
}

#else

template <class Input, class Output, class Epilogue>
bool multiply(const cpu::Product<Input, Output>& /*product*/,
              int64_t /*threads*/, const Epilogue& /*epilogue*/) {
  return false;
}

#endif

}  // namespace pkg::cpu::tiles
