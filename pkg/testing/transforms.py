"""Checks of an operator under autocast and ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .choices import choices
from .report import Recorder, require
from .samples import Sample, same_bits
from .subject import Subject, projection
from .tolerance import Expected

AUTOCAST_POLICIES = ("unchanged", "lower", "float32", "widest")
"""What autocast may do with float32, bfloat16 and float16 arguments; PyTorch's own names for these
are fallthrough, lower_precision_fp, fp32 and promote."""

_BATCH = 3


def check_autocast(subject: Subject, recorder: Recorder) -> None:
    """Under autocast the result is that of the arguments cast as the policy says, bit for bit."""
    for sample in subject.traced_samples:
        for dtype in (torch.bfloat16, torch.float16):
            with recorder.running("autocast", sample, dtype):
                cast = subject.recording(sample)
                by_hand = cast.map(_policy(subject.autocast, cast, dtype))
                plain = subject.recording(sample)
                outputs = subject.run(by_hand)
                with torch.autocast(subject.device.type, dtype=dtype):
                    casted = subject.run(plain)
                _require_same(casted, outputs, "output")
                if not subject.differentiable_tensors(sample):
                    continue
                expected = subject.gradients(cast, outputs=outputs)
                _require_same(subject.gradients(plain, outputs=casted), expected, "gradient")


def check_vmap(subject: Subject, recorder: Recorder) -> None:
    """``torch.func.vmap`` over choices of batched tensors equals a loop over the slices."""
    for sample in subject.traced_samples:
        expected = _ExpectedOfSlices(subject)
        for batched in _choices(subject, sample):
            in_dims = tuple(0 if chosen else None for chosen in batched)
            with recorder.running("vmap", sample, detail=f"in_dims {in_dims}"):
                _check_vmap(subject, sample, in_dims, expected)
        last = tuple(tensor.dim() for tensor in sample.tensors)
        with recorder.running("vmap", sample, detail=f"in_dims {last}"):
            _check_vmap(subject, sample, last, expected)
        with recorder.running("vmap", sample, detail="nested"):
            _check_nested_vmap(subject, sample, expected)


def check_func(subject: Subject, recorder: Recorder) -> None:
    """``torch.func.grad``, ``vjp`` and per-sample gradients (``vmap`` of ``grad``)."""
    for sample in subject.traced_samples:
        positions = tuple(subject.differentiable_tensors(sample))
        if not positions or sample.random:
            continue
        with recorder.running("func", sample):
            expected = subject.expected_gradients(sample)
            roots, loss = _roots_and_loss(subject, sample)
            gradients = torch.func.grad(loss, argnums=positions)
            subject.compare(gradients(*sample.copy().tensors), expected, "gradient")
            subject.compare(_vjp(subject, sample, roots), expected, "gradient")
        if "vmap" in subject.absent:
            continue
        with recorder.running("func", sample, detail="per-sample gradients"):
            slices = _slices(subject, sample)
            per_sample = torch.func.vmap(gradients)(*_stacked(slices, (0,) * len(sample.tensors)))
            for index, part in enumerate(slices):
                of_slice = [gradient[index] for gradient in per_sample]
                wanted = subject.expected_gradients(part) if index else expected
                subject.compare(of_slice, wanted, "gradient")


def _choices(subject: Subject, sample: Sample) -> Iterator[tuple[bool, ...]]:
    """Which tensors are batched: choices of some; structural ones all or none of them."""
    names = subject.names_of(sample)
    groups = [
        "structure" if name in subject.structural_inputs else str(position)
        for position, name in enumerate(names)
    ]
    for chosen in choices(list(dict.fromkeys(groups))):
        yield tuple(group in chosen for group in groups)


def _vjp(subject: Subject, sample: Sample, roots: Callable[..., list[Tensor]]) -> Sequence[Tensor]:
    """The gradients of the fixed projection by ``torch.func.vjp``, which takes no other tensors."""
    positions = subject.differentiable_tensors(sample)
    tensors = sample.copy().tensors

    def of_differentiable(*given: Tensor) -> list[Tensor]:
        every = list(tensors)
        for position, tensor in zip(positions, given, strict=True):
            every[position] = tensor
        return roots(*every)

    vjp = torch.func.vjp(of_differentiable, *(tensors[position] for position in positions))
    outputs, pull_back = vjp[0], vjp[1]
    gradients: Sequence[Tensor] = pull_back([projection(output) for output in outputs])
    return gradients


def _roots_and_loss(
    subject: Subject, sample: Sample
) -> tuple[Callable[..., list[Tensor]], Callable[..., Tensor]]:
    """The differentiable outputs as a function of the tensors, and their fixed projection."""

    def roots(*tensors: Tensor) -> list[Tensor]:
        return subject.differentiable_outputs(_flat(subject, sample)(*tensors))

    # Drawn here: under vmap a random number is an error.
    directions = [projection(root) for root in roots(*sample.copy().tensors)]

    def loss(*tensors: Tensor) -> Tensor:
        pairs = zip(roots(*tensors), directions, strict=True)
        return torch.stack([(root * direction).sum() for root, direction in pairs]).sum()

    return roots, loss


def _policy(policy: str, sample: Sample, dtype: torch.dtype) -> Callable[[Any], Any]:
    def eligible(argument: Any) -> bool:
        return (
            isinstance(argument, Tensor)
            and argument.is_floating_point()
            and argument.dtype != torch.float64
        )

    dtypes = {tensor.dtype for tensor in sample.tensors if eligible(tensor)}
    target = {
        "unchanged": None,
        "lower": dtype,
        "float32": torch.float32,
        "widest": torch.float32 if dtypes != {dtype} else dtype,
    }[policy]
    if target is None:
        return lambda argument: argument
    return lambda argument: argument.to(target) if eligible(argument) else argument


def _flat(subject: Subject, sample: Sample) -> Callable[..., list[Tensor]]:
    """The call as a function of its tensors alone."""
    return lambda *tensors: subject.run(sample.with_tensors(tensors))


def _slices(subject: Subject, sample: Sample) -> list[Sample]:
    """Three samples of the same shapes with different values."""

    def varied(tensor: Tensor, name: str, index: int) -> Tensor:
        if tensor.dim() == 0 or name in subject.structural_inputs:
            return tensor
        if index == 1:
            return tensor.flip(list(range(tensor.dim())))
        if index == 2:
            return tensor * 0.5 if tensor.is_floating_point() else tensor.roll(1)
        return tensor

    named = list(zip(sample.tensors, subject.names_of(sample), strict=True))
    return [
        sample.with_tensors(varied(tensor, name, index) for tensor, name in named)
        for index in range(_BATCH)
    ]


def _stacked(slices: Sequence[Sample], in_dims: Sequence[int | None]) -> list[Tensor]:
    columns = zip(*(part.tensors for part in slices), strict=True)
    return [
        tensors[0] if dim is None else torch.stack(tensors, dim)
        for tensors, dim in zip(columns, in_dims, strict=True)
    ]


class _ExpectedOfSlices:
    """What the reference says of the slices of one sample, once for the choices that share one."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[tuple[object, ...], list[Expected]] = {}

    def of(self, part: Sample, index: int, in_dims: Sequence[int | None]) -> list[Expected]:
        """Of the slice at an index; the first is the sample itself, whatever is batched."""
        key = (index, *(dim is None for dim in in_dims)) if index else ()
        if key not in self._known:
            self._known[key] = self._subject.expected(part)
        return self._known[key]


def _check_vmap(
    subject: Subject, sample: Sample, in_dims: Sequence[int | None], expected: _ExpectedOfSlices
) -> None:
    impossible = _writes_many_into_one(subject, sample, in_dims)
    slices = _batched_slices(subject, sample, in_dims)
    randomness = "different" if sample.random else "error"
    mapped = torch.func.vmap(_flat(subject, sample), in_dims=tuple(in_dims), randomness=randomness)
    try:
        outputs = mapped(*_stacked(slices, in_dims))
    except Exception:
        if "vmap" in subject.absent or impossible:
            return
        raise
    require(not impossible, "every slice was written into one tensor that has no batch")
    if sample.random:
        for output, single in zip(outputs, subject.run(sample.copy()), strict=True):
            require(output.shape[1:] == single.shape, f"shape {list(output.shape)} under vmap")
        return
    for index, part in enumerate(slices):
        subject.compare([output[index] for output in outputs], expected.of(part, index, in_dims))


def _writes_many_into_one(subject: Subject, sample: Sample, in_dims: Sequence[int | None]) -> bool:
    """Whether a batched call would have to write into a tensor that is not batched."""
    names = subject.names_of(sample)
    kept = [name for name, dim in zip(names, in_dims, strict=True) if dim is None]
    return len(kept) < len(names) and any(name in subject.mutates for name in kept)


def _check_nested_vmap(subject: Subject, sample: Sample, expected: _ExpectedOfSlices) -> None:
    slices = _slices(subject, sample)
    batch = _stacked(slices, (0,) * len(sample.tensors))
    outer = [torch.stack([tensor, tensor.flip(0)]) for tensor in batch]
    randomness = "different" if sample.random else "error"
    inner = torch.func.vmap(_flat(subject, sample), randomness=randomness)
    try:
        outputs = torch.func.vmap(inner, randomness=randomness)(*outer)
    except Exception:
        if "vmap" in subject.absent:
            return
        raise
    if sample.random:
        return
    batched = (0,) * len(sample.tensors)
    for position in product(range(2), range(_BATCH)):
        # The second batch is the first in reverse.
        index = _BATCH - 1 - position[1] if position[0] else position[1]
        wanted = expected.of(slices[index], index, batched)
        subject.compare([output[position] for output in outputs], wanted)


def _batched_slices(
    subject: Subject, sample: Sample, in_dims: Sequence[int | None]
) -> list[Sample]:
    """The slices, with the tensors that are not batched the same in each."""
    first = sample.tensors

    def kept(part: Sample) -> Iterator[Tensor]:
        for shared, own, dim in zip(first, part.tensors, in_dims, strict=True):
            yield shared if dim is None else own

    return [part.with_tensors(kept(part)) for part in _slices(subject, sample)]


def _require_same(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    require(len(actual) == len(expected), f"{len(actual)} {what}s, not {len(expected)}")
    for position, (result, wanted) in enumerate(zip(actual, expected, strict=True)):
        require(
            result.dtype == wanted.dtype,
            f"{what} {position} has dtype {result.dtype} under autocast, expected {wanted.dtype}",
        )
        require(same_bits(result, wanted), f"{what} {position} differs under autocast")
