"""What the formulas of integer_formulas.cpp make of integers, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def computed(formula: Callable[..., int], a: Tensor, b: Tensor) -> Tensor:
    """The formula of each pair, in the integers of 32 bits, or of 64, that hold the common dtype.

    Python's integers have no end: each step of a formula is cut by :func:`wrapped`.
    """
    common = torch.result_type(a, b)
    bits = 64 if common == torch.int64 else 32
    a, b = (each.to(common) for each in torch.broadcast_tensors(a, b))
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    results = [formula(int(x), int(y), bits) for x, y in pairs]
    return torch.tensor(results, dtype=torch.int64).to(common).reshape(a.shape)


def wrapped(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def quotient(x: int, y: int, bits: int) -> int:
    return 0 if y == 0 else wrapped(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1), bits)


FORMULAS: dict[str, Callable[[int, int, int], int]] = {
    "larger_of": lambda x, y, bits: max(x, y),
    "clipped_difference": lambda x, y, bits: max(wrapped(x - y, bits), 0),
    "quotient_of": quotient,
    "polynomial_of": lambda x, y, bits: wrapped(1 - x * (-x + 3), bits),
}


def operands() -> Iterator[tuple[Tensor, Tensor]]:
    """Of each pair of dtypes, with the largest and the least; dense and with steps."""
    for first in INTEGERS:
        for second in INTEGERS:
            a, b = torch.cartesian_prod(values(first), values(second).to(first)).T
            yield a, b.to(second)
            if first == second:
                yield a.contiguous(), b.contiguous()


def values(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return torch.tensor([False, True])
    limits = torch.iinfo(dtype)
    some = [0, 1, 2, 6, 100, limits.max, limits.min, limits.min + 1]
    if limits.min < 0:
        some += [-1, -2, -6, -100]
    return torch.tensor(some, dtype=dtype)


def check(operators: torch._ops._OpNamespace) -> None:
    for a, b in operands():
        for name, formula in FORMULAS.items():
            inputs = (a,) if name == "polynomial_of" else (a, b)
            expected = computed(formula, a, inputs[-1])
            result = getattr(operators, name)(*inputs)
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected), f"{name} of {a.dtype} and {b.dtype}"
