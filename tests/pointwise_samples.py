"""The calls that pointwise operators are checked with."""

from __future__ import annotations

import torch
from samples import FLOATING, INTEGRAL, SIZES, SPECIAL, around, every_pair, normal, of_dtype, pairs

from pkg.testing import ErrorSample, Sample

# From the largest value down to the smallest denormal, in every dtype.
RANGE = torch.cat([torch.linspace(-800, 800, 801), torch.linspace(-20, 20, 801)]).double()
SPECIAL_VALUES = torch.tensor(SPECIAL, dtype=torch.float64)


def unary_shapes() -> list[tuple[int, ...]]:
    """Around the widths of vectors and of the chunks that threads take."""
    return [(size,) for size in (*SIZES, *around(256, 1024))] + [
        (2, size) for size in around(32768)
    ]


def unary_samples(*extra: float) -> list[Sample]:
    """What a pointwise operator of one tensor must take; ``extra`` follows the tensor."""
    return [
        Sample((normal(3, 4), *extra), family="matrix"),
        Sample((normal(6, 35) * 4, *extra), family="matrix"),
        Sample((normal(2, 3, 4, 5), *extra)),
        Sample((normal(), *extra), name="no dimension"),
        Sample((normal(3, 0, 2), *extra), name="empty"),
        Sample((RANGE, *extra), name="whole range", values_only=True),
        Sample((SPECIAL_VALUES, *extra), name="special", values_only=True),
        *(Sample((normal(*shape), *extra), values_only=True) for shape in unary_shapes()),
    ]


def unary_errors(name: str, *extra: float, names: tuple[str]) -> list[ErrorSample]:
    """The tensor is called by the name in ``names``."""
    one = torch.ones(3)
    return [
        ErrorSample((one.to(dtype), *extra), match=f"{name}: {names[0]} is {dtype}")
        for dtype in (torch.int64, torch.bool, torch.complex64)
    ]


def refused_dtypes(name: str, argument: str, *before: torch.Tensor) -> list[ErrorSample]:
    """Calls with an argument that is not floating, after the arguments before it."""
    return [
        ErrorSample((*before, torch.ones(3, dtype=dtype)), match=f"{name}: {argument} is {dtype}")
        for dtype in (torch.int64, torch.bool, torch.complex64)
    ]


def binary_samples(*extra: float) -> list[Sample]:
    """What a pointwise operator of two tensors must take; ``extra`` follows the tensors."""
    infinite = [value for value in SPECIAL if abs(value) != 1]
    samples = [
        Sample((normal(3, 4), normal(3, 4), *extra), family="matrices"),
        Sample((normal(6, 5), normal(6, 5), *extra), family="matrices"),
        Sample((normal(33, 70), normal(33, 70), *extra), family="matrices"),
        Sample((normal(2, 3, 4), normal(4), *extra), family="rows"),
        Sample((normal(5, 2, 9), normal(9), *extra), family="rows"),
        Sample((normal(3, 1, 4), normal(5, 1), *extra), name="both broadcast"),
        Sample((normal(), normal(3), *extra), name="no dimension"),
        Sample((normal(), normal(), *extra), name="no dimensions"),
        Sample((normal(0), normal(0), *extra), name="empty"),
        Sample((normal(3, 0, 2), normal(0, 1), *extra), name="empty, broadcast"),
        Sample((normal(2, 3, 4, 3), normal(3, 1, 3), *extra), name="four dimensions"),
        Sample((*every_pair(infinite), *extra), name="special", values_only=True),
    ]
    for size in {*SIZES, *around(256, 1024)}:
        samples.append(Sample((normal(size), normal(size, seed=1), *extra), values_only=True))
    for size in around(32768):
        samples.append(Sample((normal(2, size), normal(size), *extra), values_only=True))
    return samples


def mixed_samples(*extra: float) -> list[Sample]:
    """Every pair of dtypes, and the tensors without dimensions that count less in promotion."""
    samples = []
    for first, second in pairs(FLOATING + INTEGRAL):
        for shape in ((5, 17), ()):
            a, b = of_dtype(first, 5, 17), of_dtype(second, *shape, seed=1)
            samples.append(Sample((a, b, *extra), values_only=True, dtypes=()))
            if shape == ():
                samples.append(Sample((b, a, *extra), values_only=True, dtypes=()))
    return samples


def binary_errors(
    name: str, *extra: float, names: tuple[str, str] = ("a", "b")
) -> list[ErrorSample]:
    """The tensors are called by ``names``."""
    one = torch.ones(3)
    first, second = names
    return [
        ErrorSample(
            (torch.ones(2, 3), torch.ones(4), *extra),
            match=rf"{name}.*{first}.*\(2, 3\).*{second}.*\(4,\)",
        ),
        ErrorSample((one.cfloat(), one, *extra), match=rf"{name}: {first} is torch.complex64"),
        ErrorSample((one, one.cdouble(), *extra), match=rf"{name}: {second} is torch.complex128"),
        ErrorSample((one.to(torch.uint16), one, *extra), match=rf"{name}: {first} is torch.uint16"),
        ErrorSample((one.to_sparse(), one, *extra), match="(?i)sparse"),
    ]
