// Maps of tensors for the copy engine (cuda/device/tensor_map.cuh). Only the
// driver encodes them; it is asked where its function is, so that nothing has
// to be linked and the library loads where there is no driver.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device/tensor_map.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda/host/launch.h"

#ifdef __CUDACC__

namespace pkg::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encoder = [] {
    constexpr unsigned kSinceVersion = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, kSinceVersion, cudaEnableDefault,
        &result));
    PKG_CHECK(result == cudaDriverEntryPointSuccess && function != nullptr,
              "the CUDA driver has no cuTensorMapEncodeTiled, which it has "
              "from CUDA 12.0 on: install a newer driver");
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return encoder;
}

template <class Element>
constexpr CUtensorMapDataType mapped_type() {
  if constexpr (std::is_same_v<Element, bfloat16>) {
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  } else if constexpr (std::is_same_v<Element, float16>) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  } else if constexpr (std::is_same_v<Element, Tf32>) {
    return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;  // which the engine rounds to
  } else {
    static_assert(sizeof(Element) == 1);
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// The tensor must be one that has_map().
template <class Element>
TensorMap encode_tensor_map(const MappedTensor<Element>& tensor) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(tensor.width),
                              static_cast<cuuint64_t>(tensor.lines),
                              static_cast<cuuint64_t>(tensor.matrices),
                              static_cast<cuuint64_t>(tensor.groups)};
  // A stride along which there is one step is none, but has to be valid.
  const auto stride = [](int64_t size, int64_t elements) {
    return size == 1 ? cuuint64_t{16}
                     : static_cast<cuuint64_t>(elements) * sizeof(Element);
  };
  const cuuint64_t strides[] = {stride(tensor.lines, tensor.line_stride),
                                stride(tensor.matrices, tensor.matrix_stride),
                                stride(tensor.groups, tensor.group_stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(tensor.kBoxWidth),
                            static_cast<cuuint32_t>(tensor.box_lines), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  void* const begin = const_cast<Element*>(tensor.data);
  TensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, mapped_type<Element>(), 4, begin, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PKG_CHECK(result == CUDA_SUCCESS,
            "the CUDA driver refuses the map of a tensor of ", tensor.groups,
            " x ", tensor.matrices, " x ", tensor.lines, " x ", tensor.width,
            " elements: CUresult ", static_cast<int>(result));
  return map;
}

}  // namespace pkg::cuda

#endif

namespace pkg::cuda {

// Whether kernels for 9.0a, with products of warpgroups, run on the device: no
// other has those instructions. PKG_CUDA_WARPGROUPS=0 does without, so that the
// two ways can be compared.
inline bool has_warpgroup_products() {
#ifdef PKG_CUDA_90A
  return compute_capability() == 90 && !is_turned_off("PKG_CUDA_WARPGROUPS");
#else
  return false;
#endif
}

}  // namespace pkg::cuda
