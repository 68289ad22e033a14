#include "cpu/int4/many_rows.h"

namespace pkg::cpu {

template void multiply_many_rows(const MatrixView<float>&, int64_t,
                                 const TiledWeight&, const float*, float*,
                                 int64_t);
template void multiply_many_rows(const MatrixView<double>&, int64_t,
                                 const TiledWeight&, const double*, double*,
                                 int64_t);
template void multiply_many_rows(const MatrixView<Half>&, int64_t,
                                 const TiledWeight&, const float*, Half*,
                                 int64_t);
template void multiply_many_rows(const MatrixView<BFloat16>&, int64_t,
                                 const TiledWeight&, const float*, BFloat16*,
                                 int64_t);

}  // namespace pkg::cpu
