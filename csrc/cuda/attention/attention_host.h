// The host side that the kernels of attention share: a call's shape and
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

#include "cuda/attention/forward.cuh"
#include "cuda/attention/gradients.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/host/launch.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cuda {

// The leading dimensions without those of size 1. Where groups of query heads
// share a key head, the heads become two dimensions, key heads and the queries
// of a group: a key is then broadcast along the second, and grouped queries
// need nothing more.
class AttentionBatch {
 public:
  explicit AttentionBatch(const AttentionShape& shape) : group_(shape.group) {
    for (size_t lead = 0; lead < shape.lead_dims; ++lead) {
      const int64_t size = shape.lead_sizes[lead];
      if (group_ > 1 && lead + 1 == shape.lead_dims) {
        add(lead, size / group_, Part::key_heads);
        add(lead, group_, Part::group);
      } else {
        add(lead, size, Part::whole);
      }
    }
  }

  const BatchSizes& sizes() const { return sizes_; }

  BatchStrides strides(const AttentionOperand& operand) const {
    BatchStrides result;
    for (int d = 0; d < sizes_.count; ++d) {
      const bool is_shared = operand.group > 1;
      const int64_t stride = operand.lead_strides[leads_[d]];
      switch (parts_[d]) {
        case Part::whole:
          result.strides[d] = stride;
          break;
        case Part::key_heads:
          result.strides[d] = is_shared ? stride : stride * group_;
          break;
        case Part::group:
          result.strides[d] = is_shared ? 0 : stride;
          break;
      }
    }
    return result;
  }

  // The batch as a tensor sees it: query, key, value or mask. For key and
  // value `group` query heads share a head.
  BatchPartition partition(const AttentionShape& shape, const Tensor& tensor,
                           int64_t group) const {
    const auto sizes = sizes_of(tensor);
    bool is_owned[kMaxBatchDims] = {};
    for (int d = 0; d < sizes_.count; ++d) {
      const size_t from_last = shape.lead_dims + 2 - leads_[d];
      const bool has_dim =
          from_last <= sizes.size() && sizes[sizes.size() - from_last] != 1;
      is_owned[d] = has_dim && !(parts_[d] == Part::group && group > 1);
    }
    return partition_batch(sizes_, is_owned);
  }

 private:
  enum class Part { whole, key_heads, group };

  void add(size_t lead, int64_t size, Part part) {
    if (size == 1) {
      return;
    }
    check_batch_dims("scaled_dot_product_attention", sizes_.count + 1);
    leads_[sizes_.count] = lead;
    parts_[sizes_.count] = part;
    sizes_.sizes[sizes_.count++] = size;
  }

  int64_t group_;
  BatchSizes sizes_;
  std::array<size_t, kMaxBatchDims> leads_;
  std::array<Part, kMaxBatchDims> parts_;
};

// The gradient of an output, or a copy whose rows are neighbours: tiles of any
// other are gathered element by element, by each block that walks over them. A
// sum's gradient is one number that was expanded.
inline Tensor with_dense_rows(const Tensor& grad_output) {
  return strides_of(grad_output).back() == 1
             ? grad_output
             : torch::stable::contiguous(grad_output);
}

template <class Element>
MatrixBatch<Element> matrix_batch(const AttentionShape& shape,
                                  const AttentionBatch& batch,
                                  const Tensor& tensor, int64_t group = 1) {
  const AttentionOperand operand = attention_operand(shape, tensor, group);
  return {static_cast<const Element*>(tensor.const_data_ptr()),
          batch.strides(operand), operand.row_stride, operand.column_stride};
}

template <class Element>
ResultBatch<Element> result_batch(const AttentionShape& shape,
                                  const AttentionBatch& batch,
                                  const Tensor& tensor, int64_t group = 1) {
  const AttentionOperand operand = attention_operand(shape, tensor, group);
  return {static_cast<Element*>(tensor.mutable_data_ptr()),
          batch.strides(operand), operand.row_stride};
}

// PKG_CUDA_COPIED_ATTENTION=0 makes attention in float32 by panels that pass
// through registers alone, so that the two ways can be compared.
inline bool copies_panels() {
  return !is_turned_off("PKG_CUDA_COPIED_ATTENTION");
}

inline MaskType mask_type(const AttentionShape& shape, const Tensor& mask) {
  const ScalarType type = dtype_of(mask);
  return type == ScalarType::Bool ? MaskType::boolean
         : type == shape.type     ? MaskType::element
                                  : MaskType::single;
}

inline AttentionMask attention_mask(const AttentionShape& shape,
                                    const AttentionBatch& batch,
                                    const std::optional<Tensor>& attn_mask) {
  if (!attn_mask) {
    return {};
  }
  const AttentionOperand operand = attention_mask_operand(shape, *attn_mask);
  return {attn_mask->const_data_ptr(), mask_type(shape, *attn_mask),
          batch.strides(operand), operand.row_stride, operand.column_stride};
}

inline AttentionVariant attention_variant(const AttentionShape& shape,
                                          const AttentionBatch& batch,
                                          const AttentionExtras& extras) {
  AttentionVariant variant{
      {}, extras.window_left, extras.window_right, extras.softcap};
  if (extras.alibi_slopes) {
    const TensorView& slopes = *extras.alibi_slopes;
    variant.slopes = {slopes.const_data_ptr(),
                      dtype_of(slopes) == ScalarType::Float,
                      batch.strides(alibi_slopes_operand(shape, slopes))};
  }
  return variant;
}

template <class Element>
AttentionProblem<Element> attention_problem(
    const AttentionShape& shape, const AttentionBatch& batch,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& dropout_seed, double dropout_p, bool is_causal,
    const AttentionExtras& extras) {
  const auto* const seed =
      dropout_seed ? static_cast<const int64_t*>(dropout_seed->const_data_ptr())
                   : nullptr;
  return {
      batch.sizes(),
      shape.batch(),
      shape.rows,
      shape.columns,
      shape.head_size,
      shape.value_size,
      matrix_batch<Element>(shape, batch, query),
      matrix_batch<Element>(shape, batch, key, shape.group),
      matrix_batch<Element>(shape, batch, value, shape.group),
      attention_mask(shape, batch, attn_mask),
      attention_dropout(seed, dropout_p),
      shape.scale,
      is_causal,
      {},
      attention_variant(shape, batch, extras),
  };
}

// The launches, defined with the operators on batches of matrices and shared by
// those on packed sequences. The caller holds a DeviceGuard.
template <class Element>
void launch_attention_forward(const AttentionForward<Element>& call,
                              DeviceId device, cudaStream_t stream);
template <class Element>
void launch_attention_delta(const AttentionBackward<Element>& call,
                            cudaStream_t stream);
// All but the mask's gradient, where key and value have the same matrices.
template <class Element>
void launch_attention_gradients(const AttentionGradQuery<Element>& query,
                                const AttentionGradKeyValue<Element>& key_value,
                                DeviceId device, cudaStream_t stream);

}  // namespace pkg::cuda
