// The two ways of int4_linear: a few rows by integer dot products, which is
// bound by reading the weight, and many rows by the core of matrix products or
// by tile registers.
#pragma once

#include <cstdint>

#include "cpu/gemm/packing.h"
#include "cpu/int4/tiled_weight.h"

namespace pkg::cpu {

// output (rows, weight's rows; contiguous) = input times the weight's
// transpose, plus bias where it is not null. Any values of input.
template <class T>
void multiply_many_rows(const MatrixView<T>& input, int64_t rows,
                        const TiledWeight& weight, const simd::Compute<T>* bias,
                        T* output, int64_t threads);

extern template void multiply_many_rows(const MatrixView<float>&, int64_t,
                                        const TiledWeight&, const float*,
                                        float*, int64_t);
extern template void multiply_many_rows(const MatrixView<double>&, int64_t,
                                        const TiledWeight&, const double*,
                                        double*, int64_t);
extern template void multiply_many_rows(const MatrixView<Half>&, int64_t,
                                        const TiledWeight&, const float*, Half*,
                                        int64_t);
extern template void multiply_many_rows(const MatrixView<BFloat16>&, int64_t,
                                        const TiledWeight&, const float*,
                                        BFloat16*, int64_t);

}  // namespace pkg::cpu
