// gelu and silu of PyTorch's own namespace, forward and backward, by the
// activations of linear: several registers side by side, where PyTorch's
// functions are calls of one register each, or gelu of float32 a primitive of
// oneDNN, of which a call takes 15 us however small it is (Zen 3). Of a few
// elements these take no longer than what is left alone.
#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cpu/accelerate/aten.h"
#include "cpu/accelerate/handles.h"
#include "cpu/accelerate/pytorch_kernels.h"
#include "cpu/accelerate/routes.h"
#include "cpu/pointwise/activation.h"
#include "host/memory_overlap.h"
#include "host/text.h"

namespace pkg::cpu::accelerate {

namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// The gradient of the result comes first, as PyTorch has it, which decides how
// the result is laid out.
template <Activation kActivation>
struct GradientThenArgument {
  static constexpr size_t kTogether = kActivatedTogether;

  template <class V, size_t kCount>
  Registers<V, kCount> operator()(const Registers<V, kCount>& grad,
                                  const Registers<V, kCount>& x) const {
    return ActivationGradient<kActivation>{}(x, grad);
  }
};

// `run` with the operation that a curve is, or its gradient is.
template <size_t kInputs, class Run>
void with_operation(Curve curve, const Run& run) {
  const auto with = [&]<Activation kActivation>() {
    if constexpr (kInputs == 1) {
      run(Activate<kActivation>{});
    } else {
      run(GradientThenArgument<kActivation>{});
    }
  };
  switch (curve) {
    case Curve::Gelu:
      return with.template operator()<Activation::Gelu>();
    case Curve::GeluTanh:
      return with.template operator()<Activation::GeluTanh>();
    case Curve::Silu:
      return with.template operator()<Activation::Silu>();
  }
}

template <size_t kInputs>
void compute(Curve curve,
             const PointwiseLoop<static_cast<int>(kInputs) + 1>& loop,
             const Destination& destination,
             const std::array<const TensorView*, kInputs>& inputs) {
  with_operation<kInputs>(curve, [&](const auto& operation) {
    with_floating_type(destination.type, [&](auto example) {
      run_pointwise<decltype(example)>(loop, destination, inputs, operation);
    });
  });
}

Shape shape_of(const TensorView& tensor) {
  Shape shape;
  shape.dims = tensor.sizes.size();
  std::ranges::copy(tensor.sizes, shape.sizes.begin());
  return shape;
}

// Tensors of one shape and one floating dtype, with elements.
bool are_alike(std::span<const TensorView> tensors) {
  const TensorView& first = tensors[0];
  return first.sizes.size() <= kMaxDims && is_floating(first.dtype) &&
         product(first.sizes) > 0 &&
         std::ranges::all_of(tensors, [&](const TensorView& each) {
           return is_plain(each) && each.dtype == first.dtype &&
                  each.device.type == aoti_torch_device_type_cpu() &&
                  std::ranges::equal(each.sizes, first.sizes);
         });
}

// Whether a result may be written to `out` while the inputs are read: all are
// contiguous, and each is the same memory or another.
bool may_write_into(const TensorView& out, std::span<const TensorView> inputs) {
  return is_contiguous(out) &&
         std::ranges::all_of(inputs, [&](const TensorView& input) {
           return is_contiguous(input) &&
                  (are_same_elements(input, out) ||
                   overlap_between(input, out) == Overlap::kNo);
         });
}

std::optional<Curve> gelu_named(std::string_view approximate) {
  if (approximate == "none") {
    return Curve::Gelu;
  }
  return approximate == "tanh" ? std::optional(Curve::GeluTanh) : std::nullopt;
}

enum class Result { New, Into, InPlace };

constexpr bool is_gelu(AtenOperator op) {
  return op == AtenOperator::Gelu || op == AtenOperator::GeluBackward;
}

// How many tensors an operator reads.
constexpr size_t inputs_of(AtenOperator op) {
  return op == AtenOperator::Gelu || op == AtenOperator::Silu ? 1 : 2;
}

// A call of an activation, or of its gradient, by the kernels of this package.
template <AtenOperator op>
class OurCall {
 public:
  // Of these tensors, and where there is one, into `out`.
  OurCall(const OwnedHandle& first, const OwnedHandle& second,
          const OwnedHandle* out)
      : views_{TensorView(first.get()),
               TensorView((kInputs == 2 ? second : first).get())},
        out_(out) {
    if (out != nullptr) {
      out_view_.emplace(out->get());
    }
  }

  // Nothing was written where it is false; made() is there where it is true
  // and there is no `out`.
  bool take(Curve curve) {
    const int type = type_index(views_[0].dtype);
    const float gain =
        can_take() ? if_enough(table(), ratio(table(), kPass, type, curve)) : 0;
    if (gain > 0) {
      try {
        const TakenCall counted(op, type, gain);
        run(curve);
        return true;
      } catch (const std::exception&) {
        // PyTorch's kernel says what is wrong, as of memory.
        return false;
      }
    }
    count_left(op, views_[0].dtype);
    return false;
  }

  const Tensor& made() const { return *made_; }

 private:
  static constexpr size_t kInputs = inputs_of(op);
  static constexpr int kOperands = kInputs + 1;
  static constexpr Pass kPass = kInputs == 1 ? Pass::Forward : Pass::Backward;

  std::span<const TensorView> inputs() const {
    return std::span(views_).first(kInputs);
  }

  bool can_take() const {
    if (!are_alike(inputs())) {
      return false;
    }
    if (!out_view_) {
      return true;
    }
    const std::array with_out = {views_[0], *out_view_};
    return are_alike(with_out) && may_write_into(*out_view_, inputs());
  }

  void run(Curve curve) {
    std::array<const TensorView*, kInputs> inputs;
    std::array<const TensorView*, kOperands> operands{};
    for (size_t i = 0; i < kInputs; ++i) {
      operands[i + 1] = inputs[i] = &views_[i];
    }
    const ScalarType type = views_[0].dtype;
    const Shape shape = shape_of(views_[0]);
    if (!out_view_) {
      const auto plan = plan_pointwise<kOperands>(shape, type, operands);
      compute(curve, plan.loop, destination_of(plan.output), inputs);
      made_ = plan.output;
      return;
    }
    operands[0] = &*out_view_;
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(out_->get(), &data));
    compute(curve, plan_pointwise_into<kOperands>(shape, operands),
            {static_cast<char*>(data), type}, inputs);
  }

  std::array<TensorView, 2> views_;
  const OwnedHandle* out_;
  std::optional<TensorView> out_view_;
  std::optional<Tensor> made_;
};

// An operator as the dispatcher calls it: tensors, gelu's `approximate`, and in
// its form with `out` that. `function` is PyTorch's own.
template <AtenOperator op, Result where, auto function>
void activation(StableIValue* stack, uint64_t /*arguments*/,
                uint64_t /*results*/) {
  constexpr size_t kInputs = inputs_of(op);
  OwnedHandle first(stack[0]);
  const OwnedHandle second =
      kInputs == 2 ? OwnedHandle(stack[1]) : OwnedHandle();
  std::string approximate = "none";
  if constexpr (is_gelu(op)) {
    approximate = to<Text>(stack[kInputs]).value;
  }
  OwnedHandle given = where == Result::Into
                          ? OwnedHandle(stack[kInputs + (is_gelu(op) ? 1 : 0)])
                          : OwnedHandle();
  OwnedHandle& out = where == Result::InPlace ? first : given;
  const auto theirs = [&](auto... tensors) {
    const auto own = PytorchKernels::instance().*function;
    if constexpr (is_gelu(op)) {
      return own(tensors..., std::string_view(approximate));
    } else {
      return own(tensors...);
    }
  };
  const std::optional<Curve> curve =
      is_gelu(op) ? gelu_named(approximate) : Curve::Silu;
  std::optional<OurCall<op>> ours;
  if (is_on() && curve) {
    ours.emplace(first, second, where == Result::New ? nullptr : &out);
  }
  const bool is_taken = ours && ours->take(*curve);
  if constexpr (where == Result::New) {
    if (is_taken) {
      stack[0] = from(ours->made());
    } else if constexpr (kInputs == 1) {
      stack[0] = theirs(first.get()).hand_over();
    } else {
      stack[0] = theirs(first.get(), second.get()).hand_over();
    }
    return;
  }
  if (!is_taken) {
    if constexpr (where == Result::InPlace) {
      theirs(out.get());
    } else if constexpr (where == Result::Into && kInputs == 1) {
      theirs(out.get(), first.get());
    } else if constexpr (where == Result::Into) {
      theirs(out.get(), first.get(), second.get());
    }
  }
  stack[0] = out.hand_over();
}

template <AtenOperator op, Result where, auto function>
AtenKernel kernel(const char* name) {
  return {name, &activation<op, where, function>,
          PytorchKernels::instance().*function != nullptr, 1};
}

}  // namespace

std::span<const AtenKernel> activation_kernels() {
  using enum AtenOperator;
  using enum Result;
  using Own = PytorchKernels;
  static const std::array kernels = {
      kernel<Gelu, New, &Own::gelu>("gelu"),
      kernel<Gelu, Into, &Own::gelu_out>("gelu.out"),
      kernel<Gelu, InPlace, &Own::gelu_in_place>("gelu_"),
      kernel<GeluBackward, New, &Own::gelu_backward>("gelu_backward"),
      kernel<GeluBackward, Into, &Own::gelu_backward_out>(
          "gelu_backward.grad_input"),
      kernel<Silu, New, &Own::silu>("silu"),
      kernel<Silu, Into, &Own::silu_out>("silu.out"),
      kernel<Silu, InPlace, &Own::silu_in_place>("silu_"),
      kernel<SiluBackward, New, &Own::silu_backward>("silu_backward"),
      kernel<SiluBackward, Into, &Own::silu_backward_out>(
          "silu_backward.grad_input"),
  };
  return kernels;
}

}  // namespace pkg::cpu::accelerate
