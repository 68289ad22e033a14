"""What error an operator may have, derived from the error that plain PyTorch has.

The rule is that of FlashAttention-3's tests: measured against the same mathematics in float64, the
error of an operator is at most twice the largest error of the plain low-precision reference on the
same input, plus the rounding of a sum at the result's scale. Here it is in full, for a reference
``f``, an input ``x`` that is exactly representable in the dtype under test, and a result ``y``:

- ``exact = f(x in float64)``; ``plain = f(x)`` in the dtype under test.
- ``|y - exact| <= 2 * max|plain - exact| + max(ulp(exact), floor)`` for every element, with
  ``floor = 2 * max|((exact + 0.3) - 0.3) - exact|``, computed in the dtype of the result.

The second part counts where the plain reference happens to be exact. One unit in the last place: a
result that is computed in a wider type and rounded once is off by half of one, and one more
rounding before it may cost the other half. And FlashAttention-3's own floor, twice the error of
adding 0.3 and taking it away: what one rounding costs among terms as large as the largest results.
A pointwise operator has no such terms; ``max_ulps`` holds it to less.

float64 has no wider type to be measured in. The rounding error of a computation is, to first order,
a constant of the data and the algorithm times the unit round-off. So the constant is measured in
float32 and scaled by the ratio of the two round-offs, 2**-29. The exact value is then only that of
plain float64, with its matrix products made accurate (:mod:`pkg.testing.exact`), and may be off by
the plain error itself, which makes the factor three. (Where a float64 result comes from a call with
mixed dtypes, plain PyTorch's own error counts if it is larger.)

A maximum over few elements says little: one dot product can be right by luck, and one that sums in
another order be unlucky. Many elements may be as few, where one that is larger than all others has
the largest error. So before an operator fails, the plain reference is evaluated on neighbouring
inputs too (each element moved by at most one unit in the last place): on 16, and where the result
is small on more, until 1024 errors have been seen or 64 inputs tried. The bound only grows with
them, so the first input by which the operator passes is the last that is evaluated.

Whatever holds an operator's result to something holds it to this: :func:`pkg.testing.check_op` by
:func:`expect`, and so do the benchmarks. Where the plain reference is a result that is at hand,
:func:`expect_beside` takes that; where it would take far too long, :func:`expect_of_terms` puts the
error of its roundings in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .exact import AccurateProducts, power_of_two
from .report import require
from .samples import Sample, same_bits

Evaluate = Callable[[Sample], list[Tensor]]
"""Runs a reference on a sample and gives its results, outputs or gradients, as a list."""

RULE = (
    "every element at most twice as far from float64 as plain PyTorch is at worst (float64: three "
    "times, scaled from float32), plus one rounding; integers equal"
)
"""The rule in one line, for those who print what they hold results to."""

_ENOUGH_ERRORS = 1024
_PART = 1 << 18  # elements of a large result that are compared at a time
_LEAST_INPUTS, _MOST_INPUTS = 16, 64
_FLOAT64_OVER_FLOAT32 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """One result tensor: what it is exactly, what plain PyTorch makes of it, and the bound."""

    exact: Tensor
    plain: Tensor
    plain_error: float
    nearby_errors: Callable[[], Iterable[float]] = tuple
    """The plain error with ever more neighbouring inputs taken in: asked for where it decides."""
    _accepted: dict[float | None, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The last result that was close enough, by ``max_ulps``: the same bits are so again."""

    def compare(self, actual: Tensor, name: str, max_ulps: float | None = None) -> None:
        """Raise AssertionError unless ``actual`` is close enough.

        Args:
            actual: the result of the operator.
            name: how the message calls it.
            max_ulps: also hold every element to this many units in the last place. Without effect
                on float64, whose exact value is known to float64 alone.
        """
        require(
            actual.dtype == self.plain.dtype,
            f"{name} has dtype {actual.dtype}; the reference gives {self.plain.dtype}",
        )
        require(
            actual.shape == self.plain.shape,
            f"{name} has shape {list(actual.shape)}; the reference gives {list(self.plain.shape)}",
        )
        require(
            actual.device == self.plain.device,
            f"{name} is on {actual.device}; the reference gives {self.plain.device}",
        )
        actual = actual.detach()
        if not actual.dtype.is_floating_point:
            _require(actual == self.plain, actual, self.plain, name, "must equal the reference")
            return

        if actual.numel() > _PART and self._holds_in_parts(actual, max_ulps):
            return
        accepted = self._accepted.get(max_ulps)
        if accepted is not None and same_bits(actual, accepted):
            return
        rounded = self.exact.to(actual.dtype)
        finite = actual.isfinite() & rounded.isfinite()
        # Where plain PyTorch overflows on the way, an operator may do either.
        agrees = finite | _identical(actual, rounded) | _identical(actual, self.plain)
        _require(agrees, actual, rounded, name, "must be infinite or NaN where the reference is")

        error = (actual.double() - self.exact).abs()
        unit = ulp(self.exact, actual.dtype)
        floor = unit.clamp(min=rounding_of_a_sum(self.exact, actual.dtype))
        plain_error = self.plain_error
        factor = 3 if actual.dtype == torch.float64 else 2
        within = ~finite | (error <= factor * plain_error + floor)
        nearby = iter(() if bool(within.all()) else self.nearby_errors())
        while not bool(within.all()) and (nearby_error := next(nearby, None)) is not None:
            plain_error = max(plain_error, nearby_error)
            within = ~finite | (error <= factor * plain_error + floor)
        bound = f"{factor} times the plain error {plain_error:.3g} plus a rounding"
        _require(within, actual, self.exact, name, f"must be within {bound}")
        if max_ulps is not None and actual.dtype != torch.float64:
            within = ~finite | (error <= max_ulps * unit)
            _require(within, actual, self.exact, name, f"must be within {max_ulps} ulp")
        if actual.numel() <= _PART:
            self._accepted[max_ulps] = actual.clone()

    def _holds_in_parts(self, actual: Tensor, max_ulps: float | None) -> bool:
        """Whether each part of a large result is close enough, which then all of it is.

        A part has no larger results than the whole, so the rounding that it is allowed is no
        larger either. Parts stay in a cache: several times as fast.
        """
        tensors = (actual, self.exact, self.plain)
        for part, exact, plain in zip(*(t.reshape(-1).split(_PART) for t in tensors), strict=True):
            expected = Expected(exact, plain, self.plain_error)
            try:
                expected.compare(part, "a part", max_ulps)
            except AssertionError:
                return False
        return True


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of ``dtype`` at each ``value``, in float64.

    Example:
        >>> ulp(torch.tensor([1.0, 1.5, 4.0]).double(), torch.bfloat16).tolist()
        [0.0078125, 0.0078125, 0.03125]
    """
    limits = torch.finfo(dtype)
    value = value.double()
    _, exponent = torch.frexp(value)
    unit = power_of_two(exponent - 1) * limits.eps
    return torch.where(value == 0, 0, unit).clamp(min=limits.smallest_normal * limits.eps)


def rounding_of_a_sum(exact: Tensor, dtype: torch.dtype) -> float:
    """Twice the largest error of adding 0.3 to ``exact`` and taking it away, in ``dtype``.

    Example:
        >>> rounding_of_a_sum(torch.tensor([0.0, 8.0]).double(), torch.bfloat16) <= 0.0625
        True
    """
    rounded = exact.to(dtype)
    error = ((rounded + 0.3 - 0.3) - rounded).double().abs()
    error = error[error.isfinite()]
    return 2 * float(error.max()) if error.numel() else 0.0


def expect(evaluate: Evaluate, sample: Sample) -> list[Expected]:
    """Evaluate a reference exactly and plainly on ``sample``, and measure the plain error."""
    plain = evaluate(sample)
    in_float64 = any(result.dtype == torch.float64 for result in plain)
    accurate = AccurateProducts() if in_float64 else nullcontext()  # type: ignore[no-untyped-call]
    with accurate:
        exact = exactly(evaluate, sample)
    measured = sample.converted(torch.float32) if in_float64 else sample
    scales = [_FLOAT64_OVER_FLOAT32 if r.dtype == torch.float64 else 1.0 for r in plain]
    errors = [_largest_error(*pair) for pair in zip(plain, exact, strict=True)]
    if in_float64:
        narrow = _errors(evaluate, measured)
        errors = [max(e, n * s) for e, n, s in zip(errors, narrow, scales, strict=True)]
    elements = min((result.numel() for result in plain if result.numel()), default=_ENOUGH_ERRORS)
    inputs = min(max(math.ceil(_ENOUGH_ERRORS / elements), _LEAST_INPUTS), _MOST_INPUTS)

    growing = _ErrorsOfNeighbours(evaluate, measured, inputs)
    parts = zip(exact, plain, errors, strict=True)
    return [
        Expected(*each, partial(growing.of, position, scales[position]))
        for position, each in enumerate(parts)
    ]


def expect_beside(exact: Tensor, plain: Tensor, terms: int = 1) -> Expected:
    """What is expected beside a plain result that is at hand, without neighbouring inputs.

    In float64, where ``exact`` is no more exact than ``plain``, the error of the roundings is taken
    as in :func:`expect_of_terms`.

    Args:
        exact: the result in float64.
        plain: PyTorch's in the dtype under test.
        terms: that are summed for one element.
    """
    exact = exact.double()
    error = _largest_error(plain, exact)
    if plain.dtype == torch.float64:
        error = max(error, _error_of_terms(exact, plain.dtype, terms))
    return Expected(exact, plain, error)


def expect_of_terms(exact: Tensor, dtype: torch.dtype, terms: int) -> Expected:
    """What is expected where no plain result is at hand: the error of the roundings of a sum.

    Each of its terms costs half a unit in the last place of the largest result, in float32 where
    ``dtype`` is narrower, and they add up as errors that know nothing of each other: to the root of
    their number. Then the sum is rounded to ``dtype``.

    Args:
        exact: the result in float64.
        dtype: of the result under test.
        terms: that are summed for one element.
    """
    exact = exact.double()
    if not dtype.is_floating_point:
        return Expected(exact, exact.to(dtype), 0.0)
    error = _error_of_terms(exact, dtype, terms)
    return Expected(exact, exact.to(dtype), error)


def _error_of_terms(exact: Tensor, dtype: torch.dtype, terms: int) -> float:
    finite = exact.abs()[exact.isfinite()]
    if not finite.numel():
        return 0.0
    largest = finite.max()
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    error = math.sqrt(terms) * float(ulp(largest, wide)) / 2
    return error if wide == dtype else error + float(ulp(largest, dtype)) / 2


def exactly(evaluate: Evaluate, sample: Sample) -> list[Tensor]:
    """The results of a reference in float64, on the sample's values as they are."""
    with _default_dtype(torch.float64):
        return [result.double() for result in evaluate(sample.map(_widened))]


def _widened(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.double()
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float64
    return argument


class _ErrorsOfNeighbours:
    """The plain errors on samples whose elements are an ulp away: each evaluated once, when asked.

    All results of a reference share them.
    """

    def __init__(self, evaluate: Evaluate, sample: Sample, inputs: int) -> None:
        self._evaluate = evaluate
        self._sample = sample
        self._neighbours = inputs - 1  # beside the sample itself
        self._generator = torch.Generator().manual_seed(0)
        self._errors: list[list[float]] = []

    def of(self, position: int, scale: float) -> Iterator[float]:
        """Of one result, on one neighbour after the other."""
        for index in range(self._neighbours):
            if index == len(self._errors):
                neighbour = self._sample.map_tensors(self._moved)
                self._errors.append(_errors(self._evaluate, neighbour))
            yield self._errors[index][position] * scale

    def _moved(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        steps = torch.randint(-1, 2, tensor.shape, generator=self._generator).to(tensor.device)
        return (tensor.double() * (1 + torch.finfo(tensor.dtype).eps * steps)).to(tensor.dtype)


def _errors(evaluate: Evaluate, sample: Sample) -> list[float]:
    """How far plain PyTorch is off, at worst, in each result."""
    pairs = zip(evaluate(sample), exactly(evaluate, sample), strict=True)
    return [_largest_error(*pair) for pair in pairs]


def _largest_error(plain: Tensor, exact: Tensor) -> float:
    if plain.numel() > _PART:
        parts = zip(*(t.reshape(-1).split(_PART) for t in (plain, exact)), strict=True)
        return max(_largest_error(*part) for part in parts)
    finite = plain.isfinite() & exact.to(plain.dtype).isfinite()
    error = (plain.double() - exact).abs()[finite]
    return float(error.max()) if error.numel() else 0.0


def _identical(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual == expected) | (actual.isnan() & expected.isnan())


def _require(holds: Tensor, actual: Tensor, expected: Tensor, name: str, rule: str) -> None:
    if bool(holds.all()):
        return
    wrong = (~holds).nonzero()
    error = (actual.double() - expected.double()).abs()[~holds].nan_to_num(nan=float("inf"))
    index = tuple(wrong[int(error.argmax())].tolist())
    raise AssertionError(
        f"{name} {rule}: {len(wrong)} of {actual.numel()} elements are not; at {list(index)} it is "
        f"{float(actual[index])!r}, expected {float(expected[index])!r}"
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
