#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "cuda/gemm/matmul_host.h"
#include "cuda/gemm/matrix_product.h"
#include "host/compiler.h"
#include "host/namespace.h"
#include "matmul.h"

namespace pkg::cuda {
namespace {

template <class Input, class Output>
void launch_matmul(const MatmulPlan& plan, const Tensor& a, const Tensor& b,
                   const Tensor& output) {
  MatmulProblem<Input, Output> problem = {};
  problem.a = static_cast<const Input*>(a.const_data_ptr());
  problem.b = static_cast<const Input*>(b.const_data_ptr());
  problem.c = static_cast<Output*>(output.mutable_data_ptr());
  problem.rows = plan.rows;
  problem.columns = plan.columns;
  problem.depth = plan.inner;
  problem.a_row_stride = plan.a_row_stride;
  problem.a_depth_stride = plan.a_column_stride;
  problem.b_depth_stride = plan.b_row_stride;
  problem.b_column_stride = plan.b_column_stride;
  problem.batch_count = plan.batch();
  int& dims = problem.batch.count;
  for (size_t d = 0; d < plan.batch_dims; ++d) {
    if (plan.batch_sizes[d] == 1) {
      continue;
    }
    check_batch_dims("matmul", dims + 1);
    problem.batch.sizes[dims] = plan.batch_sizes[d];
    problem.a_batch_strides.strides[dims] = plan.a_batch_strides[d];
    problem.b_batch_strides.strides[dims] = plan.b_batch_strides[d];
    ++dims;
  }
  launch_product(problem, KeepSums{}, output);
}

void multiply(MatmulPlan plan, const Tensor& a, const Tensor& b,
              const Tensor& output) {
  fold_batch_into_rows(plan);
  if (plan.input_type == ScalarType::Char) {
    launch_matmul<int8_t, int32_t>(plan, a, b, output);
    return;
  }
  with_floating_type(plan.input_type, [&](auto example) {
    using Input = decltype(example);
    if (plan.output_type == plan.input_type) {
      launch_matmul<Input, Input>(plan, a, b, output);
    } else if constexpr (sizeof(Input) < sizeof(float)) {
      launch_matmul<Input, float>(plan, a, b, output);
    }
  });
}

// Whether lines along the last dimension are such as the copy engine takes.
bool has_dense_lines(const Tensor& tensor) {
  constexpr int64_t kVector = 16;  // of bytes
  const auto strides = strides_of(tensor);
  return strides.back() == 1 && strides[strides.size() - 2] % kVector == 0 &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVector == 0;
}

// The tensor, or a copy that has such lines: of size 1 where it is the same
// along a dimension of the batch, as one that was expanded.
Tensor with_dense_lines(const Tensor& tensor) {
  if (has_dense_lines(tensor)) {
    return tensor;
  }
  Tensor matrices = tensor;
  const size_t batch_dims = sizes_of(tensor).size() - 2;
  for (size_t d = 0; d < batch_dims; ++d) {
    if (sizes_of(tensor)[d] > 1 && strides_of(tensor)[d] == 0) {
      matrices = torch::stable::narrow(matrices, static_cast<int64_t>(d), 0, 1);
    }
  }
  return torch::stable::contiguous(matrices);
}

// Bytes are multiplied by warpgroups only where the terms of both operands lie
// side by side, which those of a row-major second operand do not. Whether
// copies that do cost less than the kernel that takes any strides: it made 100
// tera-operations a second on an H100, 51 us for 1024 x 1024 x 1024, where the
// copy and the product took 16, and the host's time for the copy 13.
bool pays_to_copy_bytes(const MatmulPlan& plan) {
  constexpr int64_t kLeast = 512;
  constexpr int64_t kOfLine = 16;  // of which a copy's lines are multiples
  return plan.input_type == ScalarType::Char && has_warpgroup_products() &&
         std::min({plan.rows, plan.columns, plan.inner}) >= kLeast &&
         plan.inner % kOfLine == 0;
}

Tensor matmul(const Tensor& a, const Tensor& b,
              std::optional<ScalarType> out_dtype) {
  const MatmulPlan plan = plan_matmul(a, b, out_dtype);
  const DeviceGuard guard(device_of(a).index);
  const Tensor output = allocate_matmul_output(plan, a);
  if (!pays_to_copy_bytes(plan)) {
    multiply(plan, a, b, output);
    return output;
  }
  const Tensor left = with_dense_lines(a);
  const Tensor right = torch::stable::transpose(
      with_dense_lines(torch::stable::transpose(b, -2, -1)), -2, -1);
  MatmulPlan dense = plan_matmul(left, right, out_dtype);
  dense.batch_sizes = plan.batch_sizes;  // also where both are of size 1
  multiply(dense, left, right, output);
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&matmul>("matmul");
}

}  // namespace

bool is_large_product(ScalarType type, int64_t rows, int64_t columns) {
  const int64_t multiprocessors = multiprocessor_count();
  if (is_half_precision(type)) {
    return has_warpgroup_products() &&
           tiles_of(rows, 128) * tiles_of(columns, 128) >= multiprocessors;
  }
  return type == ScalarType::Float
             ? pays_large_product<float>(1, rows, columns, multiprocessors,
                                         most_shared_bytes())
             : pays_large_product<double>(1, rows, columns, multiprocessors,
                                          most_shared_bytes());
}

void multiply_matrices(const Tensor& a, const Tensor& b, const Tensor& output) {
  multiply(plan_matmul(a, b, dtype_of(output)), a, b, output);
}

// For pkg/_float32_matmul.py, by ctypes.
extern "C" PKG_EXPORT void pkg_choose_cuda_float32_products(int64_t count) {
  chosen_float32_products().store(static_cast<Float32Products>(count),
                                  std::memory_order_relaxed);
}

}  // namespace pkg::cuda
