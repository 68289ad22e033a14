// The kernels of rowwise_scaled_linear on CUTLASS 2.x's tensor-core products
// (https://github.com/NVIDIA/cutlass, BSD-3-Clause): int8 by int4, which is
// widened to int8 in registers (mma.m16n8k32.s8), and int4 by int4
// (mma.m16n8k64.s4). An epilogue visitor tree multiplies the int32 sums by both
// scales, adds the bias, and rounds to the output, in registers.
//
// Tiles: 128 x 128 by 64 values (int4: 128), 64 x 64 a warp, in 4 stages of
// cp.async: 64 (48 for s8 by s4) KiB of shared memory.
//
// They are a peer of the package's own kernels (cuda/int4/rowwise.cuh), which
// need no CUTLASS, and the first choice where they are built in, but for up to
// 16 rows (rowwise_few_rows.cuh), of which a tile of 128 wastes most, and for
// many rows that warpgroups take (rowwise_warpgroups.cuh). An H100 took 40 us
// by these for 1 to 16 rows of s8s4, 4096 to 4096, and 6 by the kernel of few
// rows for s4s4. Which are faster for 17 to 64 rows was not measured.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>

#include <algorithm>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>
#include <type_traits>

#include "cuda/int4/rowwise_cutlass.h"

namespace pkg::cuda {

// What the two products differ in. int4 by int4 is in the tensor cores of
// compute capability 8 alone; later ones emulate it.
template <bool kPacked>
struct CutlassProduct;
template <>
struct CutlassProduct<false> {
  using Left = int8_t;
  using Operation = cutlass::arch::OpMultiplyAddMixedInputUpcast;
  using Tile = cutlass::gemm::GemmShape<128, 128, 64>;
  using Warp = cutlass::gemm::GemmShape<64, 64, 64>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
  static constexpr int kNewestMajor = 9;
};
template <>
struct CutlassProduct<true> {
  using Left = cutlass::int4b_t;
  using Operation = cutlass::arch::OpMultiplyAddSaturate;
  using Tile = cutlass::gemm::GemmShape<128, 128, 128>;
  using Warp = cutlass::gemm::GemmShape<64, 64, 128>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 64>;
  static constexpr int kNewestMajor = 8;
};

// The kernel, empty for architectures on which it is never launched.
template <class Kernel, int kNewestMajor>
struct Compiled : Kernel {
  template <class... Arguments>
  CUTLASS_DEVICE static void invoke([[maybe_unused]] Arguments&&... arguments) {
#if defined(__CUDA_ARCH__)
    if constexpr (__CUDA_ARCH__ >= 800 &&
                  __CUDA_ARCH__ < 100 * (kNewestMajor + 1)) {
      Kernel::invoke(static_cast<Arguments&&>(arguments)...);
    }
#endif
  }
};

// Scales, bias and output of one type.
template <bool kPacked, class Element>
struct CutlassKernel {
  using Product = CutlassProduct<kPacked>;
  using Left = typename Product::Left;
  using Right = cutlass::int4b_t;
  static constexpr int kLeftAlignment = 128 / cutlass::sizeof_bits<Left>::value;
  static constexpr int kRightAlignment =
      128 / cutlass::sizeof_bits<Right>::value;
  static constexpr int kOutputAlignment =
      128 / cutlass::sizeof_bits<Element>::value;

  template <class... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;
  template <template <class> class Function, class Result>
  using Compute = cutlass::epilogue::threadblock::VisitorCompute<
      Function, Result, float, cutlass::FloatRoundStyle::round_to_nearest>;
  using Threads = cutlass::epilogue::threadblock::OutputTileThreadLayout<
      typename Product::Tile, typename Product::Warp, Element, kOutputAlignment,
      1>;
  using Sums = cutlass::epilogue::threadblock::VisitorAccFetch;
  using RowScale = cutlass::epilogue::threadblock::VisitorColBroadcast<
      Threads, Element, cute::Stride<cute::_1, cute::_0, int32_t>>;
  using OfColumns = cutlass::epilogue::threadblock::VisitorRowBroadcast<
      Threads, Element, cute::Stride<cute::_0, cute::_1, int32_t>>;
  using ScaledByRow = Tree<Compute<cutlass::multiplies, float>, Sums, RowScale>;
  using Scaled =
      Tree<Compute<cutlass::multiplies, float>, ScaledByRow, OfColumns>;
  using Biased = Tree<Compute<cutlass::plus, float>, Scaled, OfColumns>;
  using Store = cutlass::epilogue::threadblock::VisitorAuxStore<
      Threads, Element, cutlass::FloatRoundStyle::round_to_nearest,
      cute::Stride<int64_t, cute::_1, int64_t>>;
  using Stored = Tree<Store, Biased>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      Left, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone,
      kLeftAlignment, Right, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, kRightAlignment, Element,
      cutlass::layout::RowMajor, kOutputAlignment, int32_t, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      typename Product::Tile, typename Product::Warp,
      typename Product::Instruction, Stored,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, 4,
      typename Product::Operation, 1>::GemmKernel;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<
      Compiled<Kernel, Product::kNewestMajor>>;
};

// The problem's tensors lie as one product of two matrices, at addresses that
// 16-byte copies may use, and its sizes fit those of CUTLASS.
template <bool kPacked>
bool fits_cutlass(const RowwiseScaledProblem<kPacked>& problem,
                  int64_t element_size) {
  constexpr int64_t kLine = 16;
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kLine == 0;
  };
  const int dims = problem.rows_of.count;
  const int64_t row_stride = dims == 0 ? 0 : problem.input_strides.strides[0];
  const int64_t row_bytes = kPacked ? problem.bytes : 2 * problem.bytes;
  return dims <= 1 && problem.rows > 0 && problem.columns > 0 &&
         problem.bytes > 0 && problem.bytes % kLine == 0 &&
         problem.input_stride == 1 && problem.weight_stride == 1 &&
         (problem.rows == 1 ||
          (row_stride >= row_bytes && row_stride % kLine == 0 &&
           problem.scale_strides.strides[0] == 1)) &&
         problem.weight_column_stride >= problem.bytes &&
         problem.weight_column_stride % kLine == 0 &&
         problem.columns * element_size % kLine == 0 &&
         (problem.columns == 1 || problem.weight_scale_stride == 1) &&
         (problem.bias.data == nullptr || problem.columns == 1 ||
          problem.bias_stride == 1) &&
         is_aligned(problem.input) && is_aligned(problem.weight) &&
         is_aligned(problem.output) && is_aligned(problem.weight_scale.data) &&
         is_aligned(problem.bias.data) &&
         std::max({problem.rows, problem.columns, 2 * problem.bytes, row_stride,
                   2 * problem.weight_column_stride}) <= INT32_MAX;
}

// Rows that lie further apart than a row is long have another leading
// dimension, in values.
template <bool kPacked, class Element>
bool run_cutlass(const RowwiseScaledProblem<kPacked>& problem,
                 cudaStream_t stream) {
  using Config = CutlassKernel<kPacked, Element>;
  using Left = typename Config::Left;
  using Right = typename Config::Right;
  if (!fits_cutlass(problem, sizeof(Element))) {
    return false;
  }
  const int rows = static_cast<int>(problem.rows);
  const int columns = static_cast<int>(problem.columns);
  const int inner = static_cast<int>(2 * problem.bytes);
  const int64_t row_stride = problem.rows == 1
                                 ? (kPacked ? problem.bytes : 2 * problem.bytes)
                                 : problem.input_strides.strides[0];
  const auto values_of = [](const FloatingValues& values) {
    return static_cast<Element*>(const_cast<void*>(values.data));
  };
  // Where there is no bias -0 takes its place: added to any number, -0 too, it
  // leaves that number, and so the result has the bits that the other kernel's
  // has, which adds nothing.
  typename Config::OfColumns::Arguments bias = {
      values_of(problem.bias), Element(-0.0f), {}};
  const typename Config::Stored::Arguments epilogue = {
      {{{{}, {values_of(problem.input_scale), Element(0), {}}, {}},
        {values_of(problem.weight_scale), Element(0), {}},
        {}},
       bias,
       {}},
      {static_cast<Element*>(problem.output),
       {problem.columns, cute::_1{}, problem.rows * problem.columns}}};
  const typename Config::Device::Arguments arguments(
      cutlass::gemm::GemmUniversalMode::kGemm, {rows, columns, inner}, 1,
      epilogue, reinterpret_cast<Left*>(const_cast<int8_t*>(problem.input)),
      reinterpret_cast<Right*>(const_cast<int8_t*>(problem.weight)), nullptr,
      nullptr, problem.rows * inner, problem.columns * inner, 0, 0,
      kPacked ? 2 * row_stride : row_stride, 2 * problem.weight_column_stride,
      problem.columns, problem.columns);
  typename Config::Device product;
  // No workspace: the inner dimension is not split.
  return Config::Device::can_implement(arguments) ==
             cutlass::Status::kSuccess &&
         product.initialize(arguments, nullptr, stream) ==
             cutlass::Status::kSuccess &&
         product.run(stream) == cutlass::Status::kSuccess;
}

template <bool kPacked>
bool launch_cutlass_of_type(const RowwiseScaledProblem<kPacked>& problem,
                            cudaStream_t stream) {
  const ElementType type = problem.output_type;
  const bool is_of_one_type =
      problem.input_scale.type == type && problem.weight_scale.type == type &&
      (problem.bias.data == nullptr || problem.bias.type == type);
  const int major = compute_capability() / 10;
  if (!is_of_one_type || major < 8 ||
      major > CutlassProduct<kPacked>::kNewestMajor) {
    return false;
  }
  switch (type) {
    case ElementType::float32:
      return run_cutlass<kPacked, float>(problem, stream);
    case ElementType::float16:
      return run_cutlass<kPacked, cutlass::half_t>(problem, stream);
    case ElementType::bfloat16:
      return run_cutlass<kPacked, cutlass::bfloat16_t>(problem, stream);
    default:
      return false;
  }
}

}  // namespace pkg::cuda
