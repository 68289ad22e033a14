// Products of two matrices for other operators, by the kernels of matmul, which
// are compiled once (in matmul.cu).
#pragma once

#include "host/tensor.h"

namespace pkg::cuda {

// Whether a product of that size keeps all of the device busy with the kernels
// that reach the highest rates: by warpgroups in half precision, where the
// device has their products, else by large tiles.
bool is_large_product(ScalarType type, int64_t rows, int64_t columns);

// output = a b, of matrices of any strides; the output is contiguous, of their
// type or float32. The caller holds a DeviceGuard.
void multiply_matrices(const Tensor& a, const Tensor& b, const Tensor& output);

}  // namespace pkg::cuda
