"""Results of pointwise operators have the strides that PyTorch's own have, to the last of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pkg

Function = Callable[[Tensor, Tensor], Tensor]

OPERATORS: dict[str, tuple[Function, Function]] = {
    "mul": (pkg.ops.mul, torch.mul),
    "muladd": (lambda a, b: pkg.ops.muladd(a, b, 0.5), lambda a, b: a * b + 0.5),
    "d_sigmoid": (lambda a, b: pkg.ops.d_sigmoid(a), lambda a, b: torch.sigmoid(a)),
    "d_sigmoid_backward": (
        lambda a, b: torch.ops.pkg.d_sigmoid_backward(b, a),
        lambda a, b: torch.ops.aten.sigmoid_backward(a, b),
    ),
}
CASES = 3000


def random_tensor(choose: random.Random, shape: list[int]) -> Tensor:
    """Broadcasts to ``shape``: permuted, padded, expanded, with any strides where sizes are 1."""
    own = shape[choose.choice([0, 0, 0, choose.randint(0, len(shape))]) :]
    wanted = list(own)
    for d in range(len(own)):
        if choose.random() < 0.15:
            own[d] = 1
    order = list(range(len(own)))
    if choose.random() < 0.6:
        choose.shuffle(order)
    padded = choose.random() < 0.2
    strides, stride = [0] * len(own), 1
    for d in reversed(order):
        strides[d] = stride
        stride *= max(own[d], 1) + (choose.randint(0, 1) if padded else 0)
    for d, size in enumerate(own):
        if size == 1 and choose.random() < 0.4:
            strides[d] = choose.choice([0, 1, 2, 3, 9, 77])
    extents = zip(own, strides, strict=True)
    memory = torch.ones(1 + sum((size - 1) * step for size, step in extents if size > 0))
    tensor = memory.as_strided(own, strides)
    if choose.random() < 0.2:
        tensor = tensor.expand(wanted)
    return tensor


def random_pair(choose: random.Random) -> tuple[Tensor, Tensor]:
    sizes = [1, 1, 2, 3, 4] if choose.random() < 0.95 else [0, 1, 2]
    shape = [choose.choice(sizes) for _ in range(choose.randint(0, 5))]
    a = random_tensor(choose, shape)
    if choose.random() < 0.4:
        return a, torch.ones_like(a).as_strided_(a.shape, a.stride()) if is_dense(a) else a
    return a, random_tensor(choose, shape)


def is_dense(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and torch.ones_like(tensor).stride() == tensor.stride()


def describe(a: Tensor, b: Tensor) -> str:
    return f"{tuple(a.shape)}:{a.stride()} and {tuple(b.shape)}:{b.stride()}"


def pairs_for(operator: str) -> list[tuple[Tensor, Tensor]]:
    """Those of one shape, where that is all the operator takes."""
    choose = random.Random(operator)
    pairs = [random_pair(choose) for _ in range(CASES)]
    known = torch.ones(9)
    pairs += [(known.as_strided((1, 9, 1), (9, 1, 1)), known.as_strided((1, 9, 1), (9, 1, 9)))]
    same_shape = operator == "d_sigmoid_backward"
    return [(a, b) for a, b in pairs if not same_shape or a.shape == b.shape]


@pytest.mark.parametrize("operator", OPERATORS)
def test_strides_are_those_of_pytorch(operator: str, device: torch.device) -> None:
    ours, theirs = OPERATORS[operator]
    pairs = pairs_for(operator)
    assert len(pairs) > 1000
    for a, b in pairs:
        a, b = (moved(tensor, device) for tensor in (a, b))
        result = ours(a, b)
        assert result.stride() == theirs(a, b).stride(), describe(a, b)
        torch.testing.assert_close(result, torch.ones_like(result) * VALUES[operator])


VALUES = {
    "mul": 1.0,
    "muladd": 1.5,
    # At 1, where sigma is 0.7310585786.
    "d_sigmoid": 0.19661193324148185,
    "d_sigmoid_backward": -0.09085774767294842,
}


@pytest.mark.tracing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tracing_tells_the_strides_that_come(operator: str, dtype: torch.dtype) -> None:
    ours, _ = OPERATORS[operator]
    mode = FakeTensorMode()
    for a, b in pairs_for(operator)[::3]:
        a, b = (laid_out_like(tensor, dtype=dtype) for tensor in (a, b))
        expected = ours(a, b).stride()
        with mode:
            assert ours(mode.from_tensor(a), mode.from_tensor(b)).stride() == expected, describe(
                a, b
            )
        meta = (laid_out_like(tensor, dtype=dtype, device="meta") for tensor in (a, b))
        assert ours(*meta).stride() == expected, describe(a, b)


def laid_out_like(tensor: Tensor, **options: Any) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), **options)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor with its strides, which ``to`` does not keep."""
    if tensor.device.type == device.type:
        return tensor
    return (
        tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)
        .to(device)
        .as_strided(tensor.shape, tensor.stride())
    )
