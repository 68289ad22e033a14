#include "cuda/gemm/pack_weight.cuh"
#include "cuda/host/launch.h"
#include "host/namespace.h"
#include "packed_linear.h"

namespace pkg::cuda {
namespace {

template <class Word>
void launch_pack(const Tensor& weight, const Tensor& packed) {
  const auto sizes = sizes_of(weight);
  const auto strides = strides_of(weight);
  const auto problem =
      pack_problem(static_cast<const Word*>(weight.const_data_ptr()),
                   static_cast<Word*>(packed.mutable_data_ptr()), sizes[0],
                   sizes[1], strides[0], strides[1]);
  launch(transpose_kernel<Word>, problem.tile_count(), kTransposeThreads,
         current_stream(packed), problem);
}

Tensor pack_linear_weight(const Tensor& weight) {
  check_pack_linear_weight(weight);
  const DeviceGuard guard(device_of(weight).index);
  const Tensor packed = allocate_packed_weight(weight);
  switch (dtype_of(weight)) {
    case ScalarType::Double:
      launch_pack<uint64_t>(weight, packed);
      break;
    case ScalarType::Float:
      launch_pack<uint32_t>(weight, packed);
      break;
    default:
      launch_pack<uint16_t>(weight, packed);
  }
  return packed;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&pack_linear_weight>("pack_linear_weight");
}

}  // namespace
}  // namespace pkg::cuda
