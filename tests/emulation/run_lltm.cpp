#include <vector>

#include "cuda/lltm/gradients.cuh"
#include "cuda/lltm/step.cuh"
#include "elements.h"
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

// With split_panels the summed dimension is divided into parts of so many.
template <class Element>
void run_step(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  const int64_t hidden = request.integer("hidden");
  cuda::LltmStep<Element> step = {
      .operands = {request.integer("batch"),
                   hidden,
                   {hidden, request.integer("features")},
                   {matrix<Element>(request, "old_h"),
                    matrix<Element>(request, "input")},
                   matrix<Element>(request, "weights")},
      .bias = request.buffer<Element>("bias"),
      .bias_stride = request.integer("bias_stride"),
      .old_cell = matrix<Element>(request, "old_cell"),
      .input_sums = request.buffer<Number>("input_sums"),
      .new_h = request.buffer<Element>("new_h"),
      .new_cell = request.buffer<Element>("new_cell"),
      .gates = request.buffer<Element>("gates"),
  };
  const int64_t split_panels = request.integer("split_panels");
  std::vector<Number> parts;
  step.divide(split_panels > 0 ? split_panels : step.panel_count());
  if (split_panels > 0) {
    parts.resize(static_cast<size_t>(step.splits * step.operands.batch *
                                     cuda::kGates * hidden));
    step.parts = parts.data();
  }
  launch_blocks(request, step.pieces,
                cuda::launch_shape<cuda::GateProduct<Element>>(),
                cuda::lltm_step_kernel<Element>, step);
  if (split_panels > 0) {
    cuda::with_finish_kernel(step, [&](auto kernel, const auto& units) {
      launch_blocks(request, step.operands.batch, cuda::kTileThreads, kernel,
                    step, units);
    });
  }
}

// Where the kernel that finishes a step finds its states, of more than it can
// be run with here.
template <class Element>
void run_places(const Request& request) {
  cuda::LltmStep<Element> step = {};
  step.operands.batch = request.integer("batch");
  step.operands.units = request.integer("hidden");
  auto* places = request.buffer<int64_t>("places");
  cuda::with_finish_kernel(step, [&](auto, const auto& units) {
    using Index = decltype(units.divide(0).quotient);
    for (const int64_t index : request.integers("indices")) {
      const auto place = units.divide(static_cast<Index>(index));
      *places++ = place.quotient;
      *places++ = place.remainder;
    }
  });
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

// With split_panels as a step.
template <class Element>
void run_product(const Request& request) {
  using Number = cuda::Accumulator<Element>;
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
  const auto shape = cuda::launch_shape<cuda::BlockProduct<Element>>();
  const int64_t split_panels = request.integer("split_panels");
  if (split_panels == 0) {
    product.divide(product.panel_count());
    launch_blocks(request, product.pieces, shape,
                  cuda::lltm_product_kernel<Element, Element>, product);
    return;
  }
  auto divided =
      cuda::divided<Element, Element, Number>(product, split_panels, nullptr);
  std::vector<Number> sums(
      static_cast<size_t>(divided.splits * rows * columns));
  divided.c = sums.data();
  launch_blocks(request, divided.pieces, shape,
                cuda::lltm_product_kernel<Element, Number>, divided);
  launch_blocks(request, rows, cuda::kTileThreads,
                cuda::lltm_sum_kernel<Number, Element>,
                cuda::sum_of(product, divided));
}

template <class Element>
void run(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "lltm_step") {
    run_step<Element>(request);
  } else if (kernel == "lltm_places") {
    run_places<Element>(request);
  } else if (kernel == "lltm_gradients") {
    run_gradients<Element>(request);
  } else {
    run_product<Element>(request);
  }
}

}  // namespace

bool run_lltm(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel != "lltm_step" && kernel != "lltm_places" &&
      kernel != "lltm_gradients" && kernel != "lltm_product") {
    return false;
  }
  // A half of either kind is computed alike; the host code is run with both.
  const std::string& type = request.text("type");
  if (!with_type<double, float, cuda::bfloat16>(
          type, [&]<class Element>() { run<Element>(request); })) {
    fail(kernel + " has no kernel here for " + type);
  }
  return true;
}

}  // namespace pkg::emulation
