// The host side of attention over packed sequences: a call as the kernels of
// sequences, key heads and the query heads that share one; the strides of the
// first are 0, since a sequence is found by its offsets.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/attention/attention_host.h"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/uncovered.cuh"
#include "scaled_dot_product_attention_varlen.h"

namespace pkg::cuda {

inline BatchSizes packed_batch(const PackedAttentionShape& shape) {
  return {3, {shape.sequences, shape.key_heads, shape.group()}};
}

// As the query or, of a group of query heads one, the key sees the batch.
inline BatchPartition packed_partition(const PackedAttentionShape& shape,
                                       bool of_query) {
  bool is_owned[kMaxBatchDims] = {true, true, of_query};
  return partition_batch(packed_batch(shape), is_owned);
}

// `group` query heads share a head of the tensor (tokens, heads, size).
inline BatchStrides packed_strides(const PackedAttentionShape& shape,
                                   const Tensor& tensor, bool of_query) {
  const int64_t head = strides_of(tensor)[1];
  return of_query ? BatchStrides{{0, head * shape.group(), head}}
                  : BatchStrides{{0, head, 0}};
}

template <class Element>
MatrixBatch<Element> packed_matrices(const PackedAttentionShape& shape,
                                     const Tensor& tensor, bool of_query) {
  const auto strides = strides_of(tensor);
  return {static_cast<const Element*>(tensor.const_data_ptr()),
          packed_strides(shape, tensor, of_query), strides[0], strides[2]};
}

// What rounding took off the output, which may be empty.
template <class Element>
MatrixBatch<Element> packed_residual(const PackedAttentionShape& shape,
                                     const Tensor& output_residual) {
  return has_elements(output_residual)
             ? packed_matrices<Element>(shape, output_residual, true)
             : MatrixBatch<Element>{};
}

template <class Element>
ResultBatch<Element> packed_result(const PackedAttentionShape& shape,
                                   const Tensor& tensor, bool of_query) {
  return {static_cast<Element*>(tensor.mutable_data_ptr()),
          packed_strides(shape, tensor, of_query), strides_of(tensor)[0]};
}

inline SequenceOffsets sequence_offsets(const Tensor& cu_seqlens) {
  return {cu_seqlens.const_data_ptr(), dtype_of(cu_seqlens) == ScalarType::Long,
          strides_of(cu_seqlens)[0]};
}

inline AttentionVariant packed_variant(const PackedAttentionShape& shape,
                                       const AttentionExtras& extras) {
  AttentionVariant variant{
      {}, extras.window_left, extras.window_right, extras.softcap};
  if (extras.alibi_slopes) {
    const TensorView& slopes = *extras.alibi_slopes;
    const PackedSlopeStrides strides = packed_slope_strides(slopes);
    variant.slopes = {
        slopes.const_data_ptr(),
        dtype_of(slopes) == ScalarType::Float,
        {{strides.sequence, strides.head * shape.group(), strides.head}}};
  }
  return variant;
}

// The tensors of a call that both directions have.
struct PackedTensors {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor& cu_seqlens_q;
  const Tensor& cu_seqlens_k;
  const std::optional<Tensor>& dropout_seed;
};

template <class Element>
AttentionProblem<Element> packed_problem(
    const PackedAttentionShape& shape, const PackedTensors& tensors,
    const PackedAttentionOptions& options) {
  const auto* const seed =
      tensors.dropout_seed
          ? static_cast<const int64_t*>(tensors.dropout_seed->const_data_ptr())
          : nullptr;
  return {
      packed_batch(shape),
      shape.sequences * shape.heads,
      std::min(shape.max_rows, shape.total_rows),
      std::min(shape.max_columns, shape.total_columns),
      shape.head_size,
      shape.value_size,
      packed_matrices<Element>(shape, tensors.query, true),
      packed_matrices<Element>(shape, tensors.key, false),
      packed_matrices<Element>(shape, tensors.value, false),
      {},
      attention_dropout(seed, options.dropout_p),
      shape.scale,
      options.causal,
      {sequence_offsets(tensors.cu_seqlens_q),
       sequence_offsets(tensors.cu_seqlens_k), shape.heads, shape.total_rows,
       shape.total_columns},
      packed_variant(shape, options.extras),
  };
}

// The rows of a contiguous tensor (tokens, heads, size).
inline ZeroedRows zeroed_rows(const Tensor& tensor) {
  const auto sizes = sizes_of(tensor);
  return {tensor.mutable_data_ptr(),
          sizes[1] * sizes[2] * element_size(dtype_of(tensor))};
}

// What queries that no sequence covers get: zeros, and minus infinity where
// `log_sum_exp` is not null.
template <class Element>
void launch_uncovered_queries(const AttentionProblem<Element>& problem,
                              const ZeroedRows& rows,
                              const ZeroedRows& more_rows,
                              Accumulator<Element>* log_sum_exp,
                              cudaStream_t stream) {
  const PackedSequences& packed = problem.packed;
  const UncoveredTokens<Accumulator<Element>> call = {
      packed.rows,  problem.batch.sizes[0], packed.total_rows,
      problem.rows, {rows, more_rows},      log_sum_exp,
      packed.heads};
  launch(attention_uncovered_kernel<Accumulator<Element>>, call.block_count(),
         kUncoveredThreads, stream, call);
}

// Zeros in the gradients of tokens that no sequence covers.
template <class Element>
void launch_uncovered_gradients(const AttentionProblem<Element>& problem,
                                const Tensor& grad_query,
                                const Tensor& grad_key,
                                const Tensor& grad_value, cudaStream_t stream) {
  launch_uncovered_queries(problem, zeroed_rows(grad_query), ZeroedRows{},
                           nullptr, stream);
  const PackedSequences& packed = problem.packed;
  const UncoveredTokens<Accumulator<Element>> keys = {
      packed.columns,
      problem.batch.sizes[0],
      packed.total_columns,
      problem.columns,
      {zeroed_rows(grad_key), zeroed_rows(grad_value)},
      nullptr,
      0};
  launch(attention_uncovered_kernel<Accumulator<Element>>, keys.block_count(),
         kUncoveredThreads, stream, keys);
}

}  // namespace pkg::cuda
