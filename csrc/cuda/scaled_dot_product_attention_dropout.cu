#include "cuda/attention/attention_host.h"
#include "cuda/attention/dropout.cuh"
#include "host/integer_math.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

Tensor attention_dropout_mask(const Tensor& seed, int64_t batch, int64_t rows,
                              int64_t columns, double dropout_p) {
  check_dropout_mask(seed, batch, rows, columns, dropout_p);
  const DeviceGuard guard(device_of(seed).index);
  const Tensor output = empty_contiguous(std::array{batch, rows, columns},
                                         ScalarType::Bool, device_of(seed));
  const DropoutMask mask = {
      static_cast<uint8_t*>(output.mutable_data_ptr()),
      static_cast<const int64_t*>(seed.const_data_ptr()),
      dropout_keep_threshold(dropout_p),
      batch,
      rows,
      columns,
  };
  launch(attention_dropout_mask_kernel,
         ceil_div(mask.quad_count(), kDropoutThreads), kDropoutThreads,
         current_stream(seed), mask);
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&attention_dropout_mask>("attention_dropout_mask");
}

}  // namespace
}  // namespace pkg::cuda
