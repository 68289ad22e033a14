"""Forward mode, for which the operators have no formulas, is refused and never gives zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import pkg

OPERATORS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mul": (pkg.ops.mul, [(3, 4), (3, 4)]),
    "muladd": (lambda a, b: pkg.ops.muladd(a, b, 2.0), [(3, 4), (3, 4)]),
    "d_sigmoid": (pkg.ops.d_sigmoid, [(3, 4)]),
    "matmul": (pkg.ops.matmul, [(3, 4), (4, 5)]),
    "linear": (pkg.ops.linear, [(3, 4), (5, 4)]),
    "linear, gelu": (lambda x, w: pkg.ops.linear(x, w, None, "gelu"), [(3, 4), (5, 4)]),
    "attention": (pkg.ops.scaled_dot_product_attention, [(1, 2, 3, 4)] * 3),
    "lltm": (lambda *each: pkg.ops.lltm(*each)[0], [(2, 3), (12, 7), (12,), (2, 4), (2, 4)]),
    "rotary": (
        lambda x: pkg.ops.rotary_embedding(x, torch.ones(3, 2).double(), torch.ones(3, 2).double()),
        [(1, 1, 3, 4)],
    ),
    "correlation": (
        lambda a, b: pkg.ops.spatial_correlation_sample(a, b, patch_size=3),
        [(1, 2, 4, 4)] * 2,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_is_refused_over_reverse_mode_too(name: str) -> None:
    operator, shapes = OPERATORS[name]
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)

    def squares(first: Tensor) -> Tensor:
        return operator(first, *tensors[1:]).square().sum()

    gradient = torch.func.grad(squares)
    refused = pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|forward mode|Forward")
    for call in (
        lambda: torch.func.jvp(squares, tensors[:1], tensors[:1]),
        lambda: torch.func.jvp(gradient, tensors[:1], tensors[:1]),
        lambda: torch.func.hessian(squares)(tensors[0]),
    ):
        with refused:
            call()


def test_hessians_by_reverse_mode() -> None:
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    def hessian(linear: Callable[..., Tensor]) -> Tensor:
        jacobian = torch.func.jacrev(lambda each: linear(each, weight).square().sum())
        result: Tensor = torch.func.jacrev(jacobian)(x)
        return result

    torch.testing.assert_close(hessian(pkg.ops.linear), hessian(torch.nn.functional.linear))


def test_compiled_autograd() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        pkg.ops.matmul(x, x.detach()).sum().backward()
    expected = x.detach().sum(1).expand(4, 4)
    torch.testing.assert_close(x.grad, expected)
