"""``matmul`` and ``linear`` where dimensions are zero, and on PyTorch's own samples of them.

Operands are small whole numbers, so that sums are exact in every order: the result and the first
and second derivatives are PyTorch's to the last bit, and of its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from derivatives import derivatives
from torch import Tensor
from torch.nn import functional as F

import pkg

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_zero")

Shape = tuple[int, ...]
# Sizes that broadcast with one another, as dimensions of a batch.
PAIRS = ((0, 0), (0, 1), (1, 0), (2, 2), (1, 2), (2, 1))


def matmul_shapes(a_rank: int, b_rank: int) -> Iterator[tuple[Shape, Shape]]:
    """Operands of these ranks, of which each dimension is zero or not, in each combination."""
    a_lead, b_lead = max(a_rank - 2, 0), max(b_rank - 2, 0)
    shared = min(a_lead, b_lead)
    for rows, inner, columns in product((0, 3), (0, 4), (0, 5)):
        a_matrix = (rows, inner) if a_rank > 1 else (inner,)
        b_matrix = (inner, columns) if b_rank > 1 else (inner,)
        for own in product((0, 2), repeat=a_lead + b_lead - 2 * shared):
            for pairs in product(PAIRS, repeat=shared):
                a_batch = (*(own if a_lead > b_lead else ()), *(pair[0] for pair in pairs))
                b_batch = (*(own if b_lead > a_lead else ()), *(pair[1] for pair in pairs))
                yield (*a_batch, *a_matrix), (*b_batch, *b_matrix)


def linear_shapes(rank: int) -> Iterator[tuple[Shape, Shape, Shape | None]]:
    """Input of this rank, weight and bias."""
    for sizes in product((0, 3), repeat=rank + 1):
        *input_shape, outputs = sizes
        weight = (outputs, sizes[rank - 1])
        yield tuple(input_shape), weight, None
        yield tuple(input_shape), weight, (outputs,)
        if outputs:  # of a weight of one dimension there is no number of outputs
            yield tuple(input_shape), weight[1:], None
            yield tuple(input_shape), weight[1:], ()


def pytorch_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch refuses the bias of a weight of one dimension for most inputs."""
    if weight.dim() == 1 and bias is not None:
        return F.linear(input, weight) + bias
    return F.linear(input, weight, bias)


def whole_numbers(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, tuple(shape), generator=generator)
    return drawn.to(device, torch.float64)


def whole_numbers_like(tensor: Tensor, seed: int) -> Tensor:
    return whole_numbers(tensor.shape, tensor.device, seed)


results_of = partial(derivatives, draw=whole_numbers_like)


def check(
    ours: Callable[..., Tensor], pytorch: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    results = zip(results_of(ours, inputs), results_of(pytorch, inputs), strict=True)
    for index, (actual, expected) in enumerate(results):
        where = f"result {index} of {[tuple(tensor.shape) for tensor in inputs]}"
        assert actual.shape == expected.shape, where
        assert torch.equal(actual, expected), where


@pytest.mark.parametrize("b_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("a_rank", [1, 2, 3, 4])
def test_matmul_is_pytorchs(device: torch.device, a_rank: int, b_rank: int) -> None:
    for shapes in matmul_shapes(a_rank, b_rank):
        inputs = [whole_numbers(shape, device, seed) for seed, shape in enumerate(shapes)]
        check(pkg.ops.matmul, torch.matmul, inputs)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_linear_is_pytorchs(device: torch.device, rank: int) -> None:
    for shapes in linear_shapes(rank):
        inputs = [
            whole_numbers(shape, device, seed)
            for seed, shape in enumerate(shapes)
            if shape is not None
        ]
        check(pkg.ops.linear, pytorch_linear, inputs)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_linear_with_an_activation_is_pytorchs(device: torch.device, activation: str) -> None:
    """Where a dimension is zero: what is left is zeros, or the activation of a bias."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
    }

    def ours(*operands: Tensor) -> Tensor:
        return pkg.ops.linear(*operands, activation=activation)

    def pytorch(*operands: Tensor) -> Tensor:
        return functions[activation](pytorch_linear(*operands))

    for rank in (1, 2, 3):
        for shapes in linear_shapes(rank):
            given = [shape for shape in shapes if shape is not None]
            if all(0 not in shape for shape in given):
                continue
            inputs = [whole_numbers(shape, device, seed) for seed, shape in enumerate(given)]
            results = zip(results_of(ours, inputs), results_of(pytorch, inputs), strict=True)
            for actual, expected in results:
                torch.testing.assert_close(actual, expected, msg=f"{given}: {actual}, {expected}")


@cache
def pytorch_operators() -> dict[str, Any]:
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    names = ("matmul", "__rmatmul__", "nn.functional.linear")
    return {info.name: info for info in methods.op_db if info.name in names}


@pytest.mark.parametrize("name", ["matmul", "__rmatmul__", "nn.functional.linear"])
def test_pytorchs_own_samples(device: torch.device, name: str) -> None:
    calls: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "matmul": (pkg.ops.matmul, torch.matmul),
        "__rmatmul__": (lambda a, b: pkg.ops.matmul(b, a), lambda a, b: torch.matmul(b, a)),
        "nn.functional.linear": (pkg.ops.linear, F.linear),
    }
    operator = pytorch_operators()[name]
    samples = list(operator.sample_inputs(device, torch.float64, requires_grad=True))
    assert samples
    for sample in samples:
        assert not sample.kwargs
        tensors = [sample.input, *(value for value in sample.args if value is not None)]
        # Its shapes and layouts, with whole numbers in them.
        inputs = [tensor.detach().round().clamp(-3, 3) for tensor in tensors]
        check(*calls[name], inputs)
