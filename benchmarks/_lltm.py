"""What the benchmarks of the recurrent cell have in common: its sizes, and the tutorial's code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ._case import Returned

# Of batch, features and states.
SHAPES = ((16, 32, 128), (64, 256, 256), (128, 512, 1024))
Cell = Callable[..., tuple[Tensor, Tensor]]

CPP = """
#include <torch/extension.h>
#include <vector>

std::vector<at::Tensor> forward(at::Tensor input, at::Tensor weights,
                                at::Tensor bias, at::Tensor old_h,
                                at::Tensor old_cell) {
  auto x = at::cat({old_h, input}, 1);
  auto sums = at::addmm(bias, x, weights.t());
  auto gates = sums.chunk(3, 1);
  auto in_gate = at::sigmoid(gates[0]);
  auto out_gate = at::sigmoid(gates[1]);
  auto candidate = at::elu(gates[2]);
  auto new_cell = old_cell + candidate * in_gate;
  auto new_h = at::tanh(new_cell) * out_gate;
  return {new_h, new_cell, in_gate, out_gate, candidate, x, sums};
}

std::vector<at::Tensor> backward(at::Tensor grad_h, at::Tensor grad_cell,
                                 at::Tensor new_cell, at::Tensor in_gate,
                                 at::Tensor out_gate, at::Tensor candidate,
                                 at::Tensor x, at::Tensor sums,
                                 at::Tensor weights) {
  auto squashed = new_cell.tanh();
  auto of_out = squashed * grad_h;
  auto of_cell = out_gate * grad_h * (1 - squashed.pow(2)) + grad_cell;
  auto of_candidate = in_gate * of_cell;
  auto of_in = candidate * of_cell;
  auto gates = sums.chunk(3, 1);
  auto positive = gates[2].gt(0).type_as(sums);
  of_in = of_in * in_gate * (1 - in_gate);
  of_out = of_out * out_gate * (1 - out_gate);
  of_candidate =
      of_candidate * (positive + (1 - positive) * gates[2].clamp_max(0).exp());
  auto of_gates = at::cat({of_in, of_out, of_candidate}, 1);
  auto of_weights = of_gates.t().mm(x);
  auto of_bias = of_gates.sum(0);
  auto of_x = of_gates.mm(weights);
  const auto states = grad_h.size(1);
  return {of_x.slice(1, states), of_weights, of_bias, of_x.slice(1, 0, states),
          of_cell};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("forward", &forward);
  module.def("backward", &backward);
}
"""


def eager(input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, cell: Tensor) -> Returned:
    """The cell as the tutorial writes it in Python."""
    gates = F.linear(torch.cat([h, input], dim=1), weights, bias)
    in_gate, out_gate, candidate = gates.chunk(3, dim=1)
    new_cell = cell + F.elu(candidate) * torch.sigmoid(in_gate)
    return torch.tanh(new_cell) * torch.sigmoid(out_gate), new_cell


@cache
def tutorial() -> Cell | None:
    """The tutorial's C++ extension; None where it cannot be compiled."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return None
    from torch.utils import cpp_extension

    try:
        extension = cpp_extension.load_inline(
            "pkg_benchmark_lltm", CPP, extra_cflags=["-O3"], verbose=False
        )
    except (RuntimeError, OSError, ImportError):
        return None

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, weights, bias, old_h, old_cell):  # type: ignore[no-untyped-def]
            new_h, *saved = extension.forward(input, weights, bias, old_h, old_cell)
            ctx.save_for_backward(*saved, weights)
            return new_h, saved[0]

        @staticmethod
        def backward(ctx, grad_h, grad_cell):  # type: ignore[no-untyped-def]
            return tuple(
                extension.backward(grad_h.contiguous(), grad_cell.contiguous(), *ctx.saved_tensors)
            )

    return Function.apply  # type: ignore[no-any-return]


def gradients(cell: Cell, tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    upstream: list[Tensor] = []

    def train() -> tuple[Tensor, ...]:
        outputs = cell(*leaves)
        if not upstream:
            # The same for every peer and in every dtype.
            generator = torch.Generator().manual_seed(0)
            for output in outputs:
                values = torch.randint(-8, 9, output.shape, generator=generator) / 8
                upstream.append(values.to(output))
        return torch.autograd.grad(outputs, leaves, upstream)

    return train


def tensors_of(
    device: torch.device, dtype: torch.dtype, lead: tuple[int, ...], features: int, states: int
) -> list[Tensor]:
    inner = states + features
    shapes = ((*lead, features), (3 * states, inner), (3 * states,), *((lead[-1], states),) * 2)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    tensors[1] /= inner**0.5
    return [tensor.to(dtype) for tensor in tensors]
