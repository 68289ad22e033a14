#include "cuda/lltm/gradients.cuh"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Element>
cuda::MatrixOf<Element> matrix(const Request& request,
                               const std::string& name) {
  Element* data = request.buffer<Element>(name);
  if (data == nullptr) {
    return {};
  }
  const auto& strides = request.integers(name + "_strides");
  return {data, strides.at(0), strides.at(1)};
}

template <class Element>
void run_step(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  const cuda::LltmStep<Element> step = {
      .batch = request.integer("batch"),
      .features = request.integer("features"),
      .hidden = request.integer("hidden"),
      .input = matrix<Element>(request, "input"),
      .weights = matrix<Element>(request, "weights"),
      .bias = request.buffer<Element>("bias"),
      .bias_stride = request.integer("bias_stride"),
      .old_h = matrix<Element>(request, "old_h"),
      .old_cell = matrix<Element>(request, "old_cell"),
      .input_sums = request.buffer<Number>("input_sums"),
      .new_h = request.buffer<Element>("new_h"),
      .new_cell = request.buffer<Element>("new_cell"),
      .gates = request.buffer<Element>("gates"),
  };
  launch_blocks(request, step.tile_count(), cuda::kTileThreads,
                cuda::lltm_step_kernel<Element>, step);
}

template <class Element>
void run_gradients(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  const cuda::LltmGradientStep<Element> step = {
      .batch = request.integer("batch"),
      .hidden = request.integer("hidden"),
      .grad_hidden = matrix<Element>(request, "grad_hidden"),
      .grad_cells = matrix<Element>(request, "grad_cells"),
      .grad_gates = matrix<Element>(request, "grad_gates"),
      .gates = matrix<Element>(request, "gates"),
      .cells = matrix<Element>(request, "cells"),
      .carried_h = request.buffer<Number>("carried_h"),
      .carried_cell = request.buffer<Number>("carried_cell"),
      .grad_sums = request.buffer<Element>("grad_sums"),
      .bias_sums = request.buffer<Number>("bias_sums"),
      .grad_old_cell = request.buffer<Element>("grad_old_cell"),
      .grad_bias = request.buffer<Element>("grad_bias"),
  };
  launch_blocks(request, step.tile_count(), cuda::kTileThreads,
                cuda::lltm_gradient_kernel<Element>, step);
}

template <class Element>
void run_product(const Request& request) {
  cuda::LltmProduct<Element, Element> product = {};
  const int64_t rows = request.integer("rows");
  const int64_t columns = request.integer("columns");
  const char* const parts[] = {"0", "1"};
  for (int part = 0; part < 2; ++part) {
    const auto a = matrix<Element>(request, std::string("a") + parts[part]);
    const auto b = matrix<Element>(request, std::string("b") + parts[part]);
    const int64_t depth = request.integers("depths").at(part);
    product.a[part] = {a.data, rows, depth, a.row_stride, a.column_stride};
    product.b[part] = {b.data, columns, depth, b.column_stride, b.row_stride};
  }
  product.c = request.buffer<Element>("c");
  product.c_row_stride = request.integer("c_row_stride");
  launch_blocks(request, product.count_tiles(),
                cuda::launch_shape<cuda::BlockProduct<Element>>(),
                cuda::lltm_product_kernel<Element, Element>, product);
}

template <class Element>
bool run(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "lltm_step") {
    run_step<Element>(request);
  } else if (kernel == "lltm_gradients") {
    run_gradients<Element>(request);
  } else if (kernel == "lltm_product") {
    run_product<Element>(request);
  } else {
    return false;
  }
  return true;
}

}  // namespace

// Two types; the host code is run with all.
bool run_lltm(const Request& request) {
  if (request.text("kernel").rfind("lltm", 0) != 0) {
    return false;
  }
  return request.text("type") == "float64" ? run<double>(request)
                                           : run<float>(request);
}

}  // namespace pkg::emulation
