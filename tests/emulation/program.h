// The operators of the emulation program, one source file each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/device/device.cuh"
#include "request.h"

namespace pkg::emulation {

// Launch the kernel that request.text("kernel") names, or return false.
bool run_pointwise(const Request& request);
bool run_matmul(const Request& request);
bool run_matmul_few_rows(const Request& request);
bool run_matmul_warpgroups(const Request& request);
bool run_linear(const Request& request);
bool run_int4_linear(const Request& request);
bool run_rowwise_scaled_linear(const Request& request);
bool run_lltm(const Request& request);
bool run_rotary_embedding(const Request& request);
bool run_decode_attention(const Request& request);
bool run_spatial_correlation_sample(const Request& request);
bool run_attention_forward(const Request& request);
bool run_attention_backward(const Request& request);
bool run_attention_dropout_mask(const Request& request);
bool run_attention_uncovered(const Request& request);

// Fewer blocks than there is work, so that blocks have to take more than one
// piece, unless the test asks for a number.
template <class... Parameters, class... Arguments>
void launch_blocks(const Request& request, int64_t pieces,
                   cuda::LaunchShape shape, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  static_assert(cuda::fits_parameters<Parameters...>);
  const int64_t blocks = std::min(pieces, request.integer("blocks"));
  if (blocks > 0) {
    launch(
        {static_cast<unsigned>(blocks)}, {static_cast<unsigned>(shape.threads)},
        static_cast<size_t>(shape.shared_bytes), [&] { kernel(arguments...); },
        shape.asks_for_shared_memory());
    if (!have_stated_bounds()) {
      fail("a kernel without launch bounds");
    }
  }
}

}  // namespace pkg::emulation
