#include "cpu/accelerate/addmm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/accelerate/routes.h"
#include "cpu/gemm/activation.h"
#include "cpu/gemm/batch.h"
#include "cpu/gemm/matrix_product.h"
#include "cpu/runtime/element_types.h"
#include "host/compiler.h"
#include "host/memory_overlap.h"

namespace pkg::cpu::accelerate {

namespace {

// A batch of matrices, in elements.
struct Matrices {
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  Matrices transposed() const {
    return {batch_stride, column_stride, row_stride};
  }
};

struct AddmmPlan {
  int type;
  ScalarType dtype;
  int64_t batch;
  ProductSizes sizes;
  Matrices a, b, input, output;
};

Matrices matrices_of(const TensorView& tensor) {
  const auto strides = strides_of(tensor);
  const size_t dims = strides.size();
  return {dims == 3 ? strides[0] : 0, strides[dims - 2], strides[dims - 1]};
}

// A stride of 0 in the dimensions that the addend is broadcast in; false where
// it does not broadcast to the result.
bool plan_input(const TensorView& input, std::span<const int64_t> result,
                Matrices& to) {
  const auto sizes = sizes_of(input);
  const auto strides = strides_of(input);
  if (sizes.size() > result.size()) {
    return false;
  }
  int64_t* const places[] = {&to.column_stride, &to.row_stride,
                             &to.batch_stride};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t d = sizes.size() - 1 - i;
    if (sizes[d] != result[result.size() - 1 - i] && sizes[d] != 1) {
      return false;
    }
    *places[i] = sizes[d] == 1 ? 0 : strides[d];
  }
  return true;
}

// PyTorch refuses a factor that is finite and beyond float32, in which all but
// float64 is added up.
bool is_too_large(double factor, ScalarType dtype) {
  return dtype != ScalarType::Double && std::isfinite(factor) &&
         std::abs(factor) > double{std::numeric_limits<float>::max()};
}

// False for what PyTorch's own kernel refuses, or ours does not take. Every
// question is asked of the operands once, the quick ones first.
bool plan_operands(const AddmmCall& call, AddmmPlan& plan) {
  const TensorView& a = *call.a;
  const TensorView& b = *call.b;
  plan.dtype = a.dtype;
  plan.type = type_index(a.dtype);
  const size_t dims = a.sizes.size();
  const bool is_int = call.op == AtenOperator::IntMm;
  const bool is_batch =
      call.op == AtenOperator::Bmm || call.op == AtenOperator::Baddbmm;
  if (plan.type < 0 || (a.dtype == ScalarType::Char) != is_int ||
      b.dtype != a.dtype || dims != (is_batch ? 3U : 2U) ||
      b.sizes.size() != dims || !is_plain(a) || !is_plain(b) ||
      is_too_large(call.alpha, a.dtype) || is_too_large(call.beta, a.dtype)) {
    return false;
  }
  plan.batch = dims == 3 ? a.sizes[0] : 1;
  plan.sizes = {a.sizes[dims - 2], b.sizes[dims - 1], a.sizes[dims - 1]};
  plan.a = matrices_of(a);
  plan.b = matrices_of(b);
  return (dims == 2 || b.sizes[0] == plan.batch) &&
         b.sizes[dims - 2] == plan.sizes.inner && plan.batch > 0 &&
         plan.sizes.rows > 0 && plan.sizes.columns > 0 && plan.sizes.inner > 0;
}

Layout layout_of(const AddmmPlan& plan) {
  if (plan.a.column_stride != 1 && plan.a.row_stride == 1) {
    return Layout::LeftTransposed;
  }
  return plan.b.column_stride != 1 && plan.b.row_stride == 1
             ? Layout::RightTransposed
             : Layout::Plain;
}

ScalarType result_type(const AddmmPlan& plan) {
  return plan.dtype == ScalarType::Char ? ScalarType::Int : plan.dtype;
}

// Whether the result may be written to memory that the caller has: contiguous
// in a row or a column, and apart from what is read.
bool plan_given_output(const AddmmCall& call, const AddmmOutput& output,
                       AddmmPlan& plan) {
  const TensorView& to = *output.view;
  const auto is_apart = [&](const TensorView* from) {
    return from == nullptr || overlap_between(to, *from) == Overlap::kNo;
  };
  plan.output = matrices_of(to);
  if (plan.sizes.columns == 1) {
    plan.output.column_stride = 1;
  } else if (plan.sizes.rows == 1 && plan.output.column_stride != 1) {
    plan.output.row_stride = 1;
  }
  return (plan.output.column_stride == 1 || plan.output.row_stride == 1) &&
         overlap_in_itself(to) == Overlap::kNo && is_apart(call.a) &&
         is_apart(call.b) && is_apart(call.input);
}

// The product of the transposed operands in the other order, where the result
// is contiguous in its columns.
AddmmPlan transposed(const AddmmPlan& plan) {
  AddmmPlan other = plan;
  std::swap(other.sizes.rows, other.sizes.columns);
  other.a = plan.b.transposed();
  other.b = plan.a.transposed();
  other.input = plan.input.transposed();
  other.output = plan.output.transposed();
  return other;
}

// activation(beta * addend + alpha * sums), on sums in registers.
template <class T>
struct AddmmEpilogue {
  using Sum = simd::Compute<T>;
  static constexpr int kLanes = simd::kLanes<Sum>;

  Sum alpha;
  Sum beta;
  const T* input;  // null where there is none, or beta is 0
  int64_t row_stride;
  int64_t column_stride;
  Activation activation;

  template <class V>
  void operator()(int64_t row, int64_t column, V* sums, int rows, int vectors,
                  int tail) const {
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < vectors; ++v) {
        V& value = sums[r * vectors + v];
        value = value * alpha;
        if (input != nullptr) {
          value += beta * addend<V>(row + r, column + v * kLanes,
                                    v < vectors - 1 ? kLanes : tail);
        }
      }
    }
    activate(activation, sums, rows * vectors);
  }

 private:
  template <class V>
  V addend(int64_t row, int64_t column, int count) const {
    const T* from = input + row * row_stride + column * column_stride;
    if (column_stride == 1) {
      return simd::load_up_to(from, count);
    }
    if (column_stride == 0) {
      return simd::broadcast(static_cast<Sum>(*from));
    }
    Sum values[kLanes] = {};
    for (int i = 0; i < count; ++i) {
      values[i] = static_cast<Sum>(from[i * column_stride]);
    }
    return simd::load(values);
  }
};

template <class Input, class Output>
void run(const AddmmCall& call, const AddmmPlan& plan, Output* output) {
  const auto* a = static_cast<const Input*>(call.a->const_data_ptr());
  const auto* b = static_cast<const Input*>(call.b->const_data_ptr());
  if (plan.output.column_stride != 1) {
    std::swap(a, b);
  }
  const AddmmPlan& p = plan.output.column_stride != 1 ? transposed(plan) : plan;
  const auto product_at = [&](int64_t i, int64_t threads,
                              const auto& epilogue) {
    matrix_product<Input, Output>(
        {a + i * p.a.batch_stride, p.a.row_stride, p.a.column_stride},
        {b + i * p.b.batch_stride, p.b.row_stride, p.b.column_stride},
        p.sizes.rows, p.sizes.columns, p.sizes.inner,
        output + i * p.output.batch_stride, p.output.row_stride, threads,
        epilogue);
  };
  const int64_t each = p.sizes.rows * p.sizes.columns * p.sizes.inner;
  const bool adds = call.input != nullptr && call.beta != 0.0;
  if constexpr (std::is_same_v<Input, Output>) {
    if (adds || call.alpha != 1.0 || call.activation != Activation::None) {
      using Epilogue = AddmmEpilogue<Input>;
      using Sum = typename Epilogue::Sum;
      const auto* input =
          adds ? static_cast<const Input*>(call.input->const_data_ptr())
               : nullptr;
      return for_each_product(p.batch, each, [&](int64_t i, int64_t threads) {
        product_at(
            i, threads,
            Epilogue{static_cast<Sum>(call.alpha), static_cast<Sum>(call.beta),
                     adds ? input + i * p.input.batch_stride : nullptr,
                     p.input.row_stride, p.input.column_stride,
                     call.activation});
      });
    }
  }
  for_each_product(p.batch, each, [&](int64_t i, int64_t threads) {
    product_at(i, threads, KeepSums{});
  });
}

void run(const AddmmCall& call, const AddmmPlan& plan, void* output) {
  if (plan.dtype == ScalarType::Char) {
    return run<int8_t>(call, plan, static_cast<int32_t*>(output));
  }
  with_floating_type(plan.dtype, [&](auto example) {
    run<decltype(example)>(call, plan, static_cast<decltype(example)*>(output));
  });
}

// Sizes of the result, and whether the addend and memory for it fit them.
bool plan_result(const AddmmCall& call, AddmmOutput& output, AddmmPlan& plan) {
  const ProductSizes& sizes = plan.sizes;
  output.dims = call.a->sizes.size();
  output.sizes = {plan.batch, sizes.rows, sizes.columns};
  if (output.dims == 2) {
    output.sizes = {sizes.rows, sizes.columns};
  }
  return (call.input == nullptr ||
          (call.input->dtype == plan.dtype && is_plain(*call.input) &&
           plan_input(*call.input, output.result_sizes(), plan.input))) &&
         (output.view == nullptr ||
          (output.view->dtype == result_type(plan) && is_plain(*output.view) &&
           std::ranges::equal(output.view->sizes, output.result_sizes())));
}

// The table's ratio where the call is to be taken over, else 0.
float gain_of(const AddmmCall& call, const AddmmOutput& output,
              AddmmPlan& plan) {
  const Table& measured = table();
  const float gain = if_enough(
      measured,
      ratio(measured, plan.batch > 1 ? Family::Batch : Family::Product,
            plan.type, layout_of(plan), plan.sizes));
  return gain > 0 && (output.view == nullptr ||
                      plan_given_output(call, output, plan))
             ? gain
             : 0;
}

void run_taken(const AddmmCall& call, AddmmPlan& plan, AddmmOutput& output) {
  if (output.view == nullptr) {
    output.made = empty_contiguous(output.result_sizes(), result_type(plan),
                                   device_of(*call.a));
    output.data = output.made->mutable_data_ptr();
    plan.output = {plan.sizes.rows * plan.sizes.columns, plan.sizes.columns, 1};
  }
  run(call, plan, output.data);
}

}  // namespace

Answer addmm(const AddmmCall& call, AddmmOutput& output) {
  AddmmPlan plan{};
  const bool is_well_formed =
      plan_operands(call, plan) && plan_result(call, output, plan);
  if (is_on()) {
    // PyTorch reads no operand where alpha is 0: no NaN comes of them then.
    const float gain =
        is_well_formed && call.alpha != 0.0 ? gain_of(call, output, plan) : 0;
    if (gain > 0) {
      const TakenCall taken(call.op, plan.type, gain);
      run_taken(call, plan, output);
      return Answer::Taken;
    }
    count_left(call.op, call.a->dtype);
  }
  return is_well_formed ? Answer::Left : Answer::Refused;
}

}  // namespace pkg::cpu::accelerate

// For pkg._C.
extern "C" PKG_EXPORT pkg::Answer pkg_accelerated_addmm(
    const pkg::AddmmCall& call, pkg::AddmmOutput& output) {
  return pkg::cpu::accelerate::addmm(call, output);
}
