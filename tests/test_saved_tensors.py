"""What autograd keeps of a call, and the exceptions that pass through one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import pkg

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mul": (pkg.ops.mul, [(3, 4), (4,)]),
    "muladd": (lambda a, b: pkg.ops.muladd(a, b, 0.5), [(3, 1), (3, 4)]),
    "matmul": (pkg.ops.matmul, [(3, 4), (4, 5)]),
    "matmul of a batch": (pkg.ops.matmul, [(2, 3, 4), (4, 5)]),
    "matmul of vectors": (pkg.ops.matmul, [(4,), (4,)]),
    "matmul of a row": (pkg.ops.matmul, [(4,), (4, 5)]),
    "matmul of a column": (pkg.ops.matmul, [(3, 4), (4,)]),
    "linear": (pkg.ops.linear, [(2, 3, 4), (5, 4)]),
    "linear of a vector": (pkg.ops.linear, [(3, 4), (4,)]),
    "spatial_correlation_sample": (
        lambda a, b: pkg.ops.spatial_correlation_sample(a, b, patch_size=3),
        [(1, 2, 3, 3)] * 2,
    ),
}


def saved_by(call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        return call(), saved


@pytest.mark.parametrize("constant", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_of_a_product_with_a_constant_the_constant_is_kept(name: str, constant: int) -> None:
    function, shapes = PRODUCTS[name]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    varied = tensors[1 - constant].requires_grad_()
    output, saved = saved_by(lambda: function(*tensors))
    assert [each.data_ptr() for each in saved] == [tensors[constant].data_ptr()]
    # What no gradient needs may change meanwhile, as with PyTorch's operators.
    with torch.no_grad():
        before = varied.clone()
        varied.zero_()
    direction = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, varied, direction)
    both = [each.detach().requires_grad_() for each in tensors]
    both[1 - constant] = before.requires_grad_()
    expected = torch.autograd.grad(function(*both), before, direction)[0]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_a_bias_alone_keeps_neither() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    bias = torch.zeros(5, requires_grad=True)
    output, saved = saved_by(lambda: pkg.ops.linear(x, weight, bias))
    assert not saved
    for times in (1, 2):  # nothing is freed either
        output.sum().backward()
        torch.testing.assert_close(bias.grad, torch.full((5,), 3.0 * times))


def test_second_derivatives_of_a_product_with_a_constant() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64)

    def cubes(linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(linear(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    expected = cubes(torch.nn.functional.linear)
    torch.testing.assert_close(cubes(pkg.ops.linear), expected)
    torch.testing.assert_close(cubes(lambda x, w: pkg.ops.matmul(x, w.mT)), expected)


def attention(query: Tensor, **options: Any) -> Tensor:
    return pkg.ops.scaled_dot_product_attention(query, query, query, **options)


def packed_attention(query: Tensor, **options: Any) -> Tensor:
    tokens, starts = query[0].transpose(0, 1), torch.tensor([0, 3, 8])
    return pkg.ops.scaled_dot_product_attention_varlen(
        *(tokens, tokens, tokens, starts, starts, 5, 5), **options
    )


def lltm(rows: Tensor) -> Tensor:
    state = rows[0, 0, :, :2]
    weights, bias = torch.ones(6, 6, dtype=rows.dtype), torch.zeros(6, dtype=rows.dtype)
    return pkg.ops.lltm(rows[0, 0], weights, bias, state, state)[0]


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "attention with dropout": lambda q: attention(q, dropout_p=0.5),
    "packed attention": packed_attention,
    "packed attention with dropout": lambda q: packed_attention(q, dropout_p=0.5),
    "matmul": lambda x: pkg.ops.matmul(x, x.mT),
    "linear": lambda x: pkg.ops.linear(x, x[0, 0], None, "gelu"),
    "mul": lambda x: pkg.ops.mul(x, x),
    "d_sigmoid": pkg.ops.d_sigmoid,
    "lltm": lltm,
}


CONTEXTS = [
    pytest.param(nullcontext, id="plain"),
    pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), id="autocast"),
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", LAST)
def test_checkpoints_that_end_with_an_operator(
    name: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    gradients = []
    for call in (LAST[name], lambda x: checkpoint(LAST[name], x, use_reentrant=False)):
        torch.manual_seed(0)
        with context():
            output = call(x)
        gradients.append(torch.autograd.grad(output.sum(), x)[0])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Interrupted(BaseException):
    """As KeyboardInterrupt is, which pytest would take for its own."""


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", LAST)
def test_an_exception_of_pythons_stays_what_it_is(
    name: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    def interrupt(tensor: Tensor) -> Tensor:
        raise Interrupted

    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with pytest.raises(Interrupted), saved_tensors_hooks(interrupt, lambda each: each), context():
        LAST[name](x)
