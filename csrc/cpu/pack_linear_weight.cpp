// pack_linear_weight: the weight as the product's packed right operand, once
// instead of at every call. Bound by memory: it is read and written once.
#include "cpu/gemm/packed_product.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/huge_pages.h"
#include "cpu/runtime/parallel.h"
#include "host/namespace.h"
#include "packed_linear.h"

namespace pkg::cpu {
namespace {

Tensor pack_linear_weight(const TensorView& weight) {
  check_pack_linear_weight(weight);
  const Tensor packed = allocate_packed_weight(weight);
  void* const to = packed.mutable_data_ptr();
  const int64_t bytes = product(sizes_of(packed)) * element_size(weight.dtype);
  prefer_huge_pages(to, bytes);
  const auto sizes = sizes_of(weight);
  const auto strides = strides_of(weight);
  with_floating_type(dtype_of(weight), [&](auto example) {
    using T = decltype(example);
    PKG_CHECK(packed_right_elements<T>(sizes[0], sizes[1]) <=
                  (sizes[0] + kPackedRows) * (sizes[1] + kPackedColumns),
              "pack_linear_weight: the panels do not fit in the packed tensor");
    const MatrixView<T> right{static_cast<const T*>(weight.const_data_ptr()),
                              strides[1], strides[0]};
    pack_right_operand(right, sizes[0], sizes[1], static_cast<T*>(to),
                       num_threads());
  });
  // Few rows are bound by reading it. Zen 4, 4096 x 4096 from memory, one row:
  // float32 3.3 ms and 2.4, bfloat16 1.63 and 1.19, float16 1.87 and 1.63.
  move_to_huge_pages(to, bytes);
  return packed;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&pack_linear_weight>("pack_linear_weight");
}

}  // namespace
}  // namespace pkg::cpu
