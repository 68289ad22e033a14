// The part of a request that every kernel of attention shares.
#pragma once

#include <string>

#include "batches.h"
#include "cuda/attention/kernel_choice.h"
#include "cuda/attention/problem.cuh"
#include "elements.h"
#include "program.h"

namespace pkg::emulation {

template <class Element>
cuda::MatrixBatch<Element> matrix_batch(const Request& request,
                                        const std::string& name) {
  const auto& strides = request.integers(name + "_strides");
  return {request.buffer<Element>(name),
          batch_strides(request.integers(name + "_batch_strides")),
          strides.at(0), strides.at(1)};
}

// `name` absent leaves the data null.
template <class Element>
cuda::ResultBatch<Element> result_batch(const Request& request,
                                        const std::string& name) {
  Element* const data = request.buffer<Element>(name);
  if (data == nullptr) {
    return {};
  }
  return {data, batch_strides(request.integers(name + "_batch_strides")),
          request.integers(name + "_strides").at(0)};
}

template <class Element>
cuda::AttentionMask attention_mask(const Request& request) {
  if (request.buffer<uint8_t>("mask") == nullptr) {
    return {};
  }
  const std::string& type = request.text("mask_type");
  const auto& strides = request.integers("mask_strides");
  return {request.buffer<uint8_t>("mask"),
          type == "bool"                 ? cuda::MaskType::boolean
          : type == request.text("type") ? cuda::MaskType::element
                                         : cuda::MaskType::single,
          batch_strides(request.integers("mask_batch_strides")), strides.at(0),
          strides.at(1)};
}

inline cuda::SequenceOffsets sequence_offsets(const Request& request,
                                              const std::string& name) {
  return {request.buffer<uint8_t>(name),
          request.text(name + "_type") == "int64",
          request.integer(name + "_stride")};
}

inline cuda::PackedSequences packed_sequences(const Request& request) {
  if (request.buffer<uint8_t>("cu_seqlens_q") == nullptr) {
    return {};
  }
  const auto& batch = request.integers("batch");
  return {sequence_offsets(request, "cu_seqlens_q"),
          sequence_offsets(request, "cu_seqlens_k"), batch.at(1) * batch.at(2),
          request.integers("tokens").at(0), request.integers("tokens").at(1)};
}

// The window as two integers; the slopes expanded over the batch.
template <class Element>
cuda::AttentionVariant attention_variant(const Request& request) {
  const auto& window = request.integers("window");
  cuda::AttentionVariant variant{
      {}, window.at(0), window.at(1), request.real("softcap")};
  if (request.buffer<uint8_t>("slopes") != nullptr) {
    variant.slopes = {request.buffer<uint8_t>("slopes"),
                      request.text("slopes_type") == "float32",
                      batch_strides(request.integers("slopes_strides"))};
  }
  return variant;
}

template <class Element>
cuda::AttentionProblem<Element> attention_problem(const Request& request) {
  const double dropout = request.real("dropout");
  return {
      .batch = batch_sizes(request.integers("batch")),
      .batch_count = count_of(request.integers("batch")),
      .rows = request.integer("rows"),
      .columns = request.integer("columns"),
      .head_size = request.integer("head_size"),
      .value_size = request.integer("value_size"),
      .query = matrix_batch<Element>(request, "query"),
      .key = matrix_batch<Element>(request, "key"),
      .value = matrix_batch<Element>(request, "value"),
      .mask = attention_mask<Element>(request),
      .dropout =
          cuda::attention_dropout(request.buffer<int64_t>("seed"), dropout),
      .scale = request.real("scale"),
      .is_causal = request.integer("is_causal") != 0,
      .packed = packed_sequences(request),
      .variant = attention_variant<Element>(request),
  };
}

// What kernels may have of a block's shared memory, to which launches are held
// from now on. Those by products of warpgroups, which only devices with 227 KiB
// have, do not ask.
inline int most_shared_bytes(const Request& request, bool has_warpgroups) {
  constexpr int64_t kWithWarpgroups = 227 * 1024;
  const int64_t bytes = request.integer("most_shared_bytes");
  set_most_shared_bytes(
      static_cast<size_t>(has_warpgroups ? kWithWarpgroups : bytes));
  return static_cast<int>(bytes);
}

inline cuda::AttentionDevice device_of(const Request& request) {
  const bool has_warpgroups = request.integer("warpgroups") != 0;
  return {.most_shared_bytes = most_shared_bytes(request, has_warpgroups),
          .multiprocessors = 2,
          .has_warpgroup_products = has_warpgroups};
}

// Calls function.operator()<Element>() for the type that the request names.
template <class Function>
void for_attention_type(const Request& request, Function&& function) {
  const std::string& type = request.text("type");
  if (!with_type<double, float, cuda::float16, cuda::bfloat16>(type,
                                                               function)) {
    fail("attention has no kernel for " + type);
  }
}

}  // namespace pkg::emulation
