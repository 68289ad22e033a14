"""Checks of the derivatives of an operator."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .choices import choices
from .report import Recorder, require
from .samples import Sample
from .subject import Subject, projection

_SLOW_MODE_ELEMENTS = 64
"""Inputs of more elements are checked along random directions, not element by element."""

_UNREGISTERED = ".*autograd kernel was not registered.*"


def check_gradients(subject: Subject, recorder: Recorder) -> None:
    """Gradients agree with the reference's, for choices of inputs that require grad."""
    if not subject.differentiable:
        _check_not_differentiable(subject, recorder)
        return
    for sample, dtype in subject.variants():
        positions = subject.differentiable_tensors(sample)
        if not positions:
            continue
        with recorder.running("gradients", sample, dtype):
            expected = subject.expected_gradients(sample)
            recorded = subject.recording(sample)
            outputs = subject.run(recorded)
            for output in subject.differentiable_outputs(outputs):
                require(output.requires_grad, "an output does not require grad")
            actual = subject.gradients(recorded, outputs=outputs)
            subject.compare(actual, expected, "gradient")
        with recorder.running("gradients", sample, dtype, "no_grad"), torch.no_grad():
            for output in subject.run(subject.recording(sample)):
                require(not output.requires_grad, "an output requires grad under no_grad")
        if sample.values_only:
            continue
        for chosen in choices(positions):
            if len(chosen) == len(positions):
                continue
            with recorder.running("gradients", sample, dtype, f"for tensors {list(chosen)}"):
                some = subject.gradients(subject.recording(sample, chosen))
                wanted = [expected[positions.index(position)] for position in chosen]
                subject.compare(some, wanted, "gradient")


def check_gradcheck(subject: Subject, recorder: Recorder) -> None:
    """``torch.autograd.gradcheck`` in float64, also of a batch of gradients."""
    for sample, function, inputs in _float64_functions(subject):
        with recorder.running("gradcheck", sample, torch.float64):
            torch.autograd.gradcheck(
                function,
                inputs,
                check_batched_grad="vmap" not in subject.absent,
                fast_mode=_elements(inputs) > _SLOW_MODE_ELEMENTS,
            )


def check_gradgradcheck(subject: Subject, recorder: Recorder) -> None:
    """``torch.autograd.gradgradcheck`` in float64; a lack of it must be an error, not a zero."""
    for sample, function, inputs in _float64_functions(subject):
        with recorder.running("gradgradcheck", sample, torch.float64):
            torch.manual_seed(0)
            if "gradgradcheck" in subject.absent:
                _require_no_second_derivative(function, inputs)
                continue
            torch.autograd.gradgradcheck(
                function, inputs, fast_mode=_elements(inputs) > _SLOW_MODE_ELEMENTS
            )


def check_jvp(subject: Subject, recorder: Recorder) -> None:
    """Forward mode gives the tangents that match the backward, or an error, but never zeros.

    Of the operator, and of its gradients: a level of forward mode below one that records.
    """
    for sample, function, inputs in _float64_functions(subject):
        with recorder.running("jvp", sample, torch.float64):
            tangents = tuple(projection(tensor.detach()) for tensor in inputs)
            _require_tangents(function, inputs, tangents)
            if "gradgradcheck" not in subject.absent:
                _require_tangents_of_gradients(function, inputs, tangents)


# In words, or by a node that has a formula of reverse mode alone.
_REFUSAL = re.compile(r"forward[- ]mode|jvp|tangent|derivative|gradient", re.IGNORECASE)


def _pushed(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Any, Any] | None:
    """The outputs and their tangents; None where forward mode is refused."""
    leaves = tuple(tensor.detach() for tensor in inputs)
    try:
        pushed = torch.func.jvp(function, leaves, tangents)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or _REFUSAL.search(str(error)):
            return None
        raise
    return pushed[0], pushed[1]


def _require_tangents(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> None:
    dual_outputs = _pushed(function, inputs, tangents)
    if dual_outputs is None:
        return
    outputs, pushed = dual_outputs
    directions = [projection(output) for output in outputs]
    gradients = torch.autograd.grad(function(*inputs), inputs, directions, materialize_grads=True)
    # <direction, J tangent> = <direction J, tangent>, each summed in its own order.
    terms = [a * b for a, b in zip(pushed, directions, strict=True)]
    dual = [a * b for a, b in zip(gradients, tangents, strict=True)]
    size = max(float(sum(term.abs().sum() for term in part)) for part in (terms, dual))
    difference = abs(float(sum(t.sum() for t in terms) - sum(t.sum() for t in dual)))
    bound = _elements(inputs) * torch.finfo(torch.float64).eps * size
    require(difference <= bound, f"forward mode and backward differ by {difference}")


def _require_tangents_of_gradients(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> None:
    def squares(*given: Tensor) -> Tensor:
        return torch.stack([output.square().sum() for output in function(*given)]).sum()

    gradient = torch.func.grad(squares, tuple(range(len(inputs))))
    dual_gradients = _pushed(gradient, inputs, tangents)
    if dual_gradients is None:
        return
    gradients = torch.autograd.grad(
        squares(*inputs), inputs, create_graph=True, materialize_grads=True
    )
    # The second derivatives are symmetric: those of <gradient, tangent> are H tangent.
    varying = [(g, t) for g, t in zip(gradients, tangents, strict=True) if g.requires_grad]
    if not varying:
        return
    expected = torch.autograd.grad(
        [g for g, _ in varying], inputs, [t for _, t in varying], materialize_grads=True
    )
    for position, (actual, right) in enumerate(zip(dual_gradients[1], expected, strict=True)):
        require(
            torch.allclose(actual, right, rtol=1e-7, atol=1e-7 * _largest(right)),
            f"forward mode over a gradient differs from the second derivative by "
            f"{_largest(actual - right)}, of argument {position}",
        )


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _float64_functions(
    subject: Subject,
) -> Iterator[tuple[Sample, Callable[..., Any], tuple[Tensor, ...]]]:
    """Each sample as a function of its differentiable float64 tensors alone."""
    if not subject.differentiable:
        return
    for sample in subject.samples:
        if sample.values_only or sample.random or not sample.gradcheck:
            continue
        if torch.float64 not in subject.dtypes_of(sample):
            continue
        positions = [
            position
            for position in subject.differentiable_tensors(sample)
            if sample.tensors[position].dtype == torch.float64
        ]
        recorded = subject.recording(sample, positions)
        inputs = tuple(tensor for tensor in recorded.tensors if tensor.requires_grad)
        if not inputs or _elements(inputs) == 0:
            continue

        def function(
            *given: Tensor, recorded: Sample = recorded, positions: list[int] = positions
        ) -> tuple[Tensor, ...]:
            tensors = recorded.tensors
            for position, tensor in zip(positions, given, strict=True):
                tensors[position] = tensor
            outputs = subject.run(recorded.with_tensors(tensors))
            return tuple(subject.differentiable_outputs(outputs))

        yield sample, function, inputs


def _check_not_differentiable(subject: Subject, recorder: Recorder) -> None:
    """Without gradients, a call that asks for one must refuse or return plain tensors."""
    tensors = [tensor for sample in subject.traced_samples for tensor in sample.tensors]
    if not any(tensor.is_floating_point() for tensor in tensors):
        with recorder.running("gradients", "no argument that could require grad"):
            return
    for sample in subject.traced_samples:
        named = zip(subject.names_of(sample), sample.tensors, strict=True)
        positions = [
            position
            for position, (name, tensor) in enumerate(named)
            if tensor.is_floating_point() and name not in subject.mutates
        ]
        if not positions:
            continue
        with recorder.running("gradients", sample, detail="declared absent"):
            try:
                outputs = subject.run(subject.recording(sample, positions))
                roots = [output for output in outputs if output.requires_grad]
                with warnings.catch_warnings():
                    # So PyTorch warns in a backward pass where no formula is registered.
                    warnings.filterwarnings("error", message=_UNREGISTERED)
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            except (RuntimeError, UserWarning):
                continue
            require(not roots, "gradients are declared absent, and a backward pass succeeded")


def _require_no_second_derivative(
    function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
) -> None:
    outputs = function(*inputs)
    try:
        with warnings.catch_warnings():
            # PyTorch only warns where an operator of the backward has no formula of its own.
            warnings.filterwarnings("error", message=_UNREGISTERED)
            first = torch.autograd.grad(
                outputs, inputs, [torch.ones_like(o) for o in outputs], create_graph=True
            )
            torch.autograd.grad([gradient.sum() for gradient in first], inputs)
    except RuntimeError:
        return
    raise AssertionError("a second derivative is declared absent, and one was given")


def _elements(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() for tensor in tensors)
