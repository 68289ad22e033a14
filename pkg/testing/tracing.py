"""Checks of an operator without its values: fake and meta tensors, compilation, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .layouts import LAYOUTS, TRANSPOSED, expanded
from .report import Recorder, require
from .samples import Sample
from .subject import Function, Subject, quiet_dynamo

_INDUCTOR_SAMPLES = 2


def check_fake(subject: Subject, recorder: Recorder) -> None:
    """A fake tensor gets the shape, dtype, strides and device of the real result."""
    for sample in _placed_samples(subject):
        with recorder.running("fake", sample):
            outputs = subject.run(sample.copy())
            with FakeTensorMode() as mode:
                fake = sample.map_tensors(mode.from_tensor)
            for function in subject.ways:
                with mode:
                    fakes = subject.run(fake, function)
                _require_same_form(fakes, outputs, [output.device for output in outputs])


def check_meta(subject: Subject, recorder: Recorder) -> None:
    """A meta tensor gets the shape, dtype and strides of the real result."""
    for sample in _placed_samples(subject):
        with recorder.running("meta", sample):
            outputs = subject.run(sample.copy())
            meta = sample.map(_on_meta)
            for function in subject.ways:
                results = subject.run(meta, function)
                _require_same_form(results, outputs, [torch.device("meta")] * len(outputs))


def check_compile(subject: Subject, recorder: Recorder) -> None:
    """``torch.compile(fullgraph=True)`` with static shapes, forward and backward."""
    for sample in subject.traced_samples:
        with recorder.running("compile", sample), quiet_dynamo():
            compiled = torch.compile(
                _plain_function(subject.function),
                fullgraph=True,
                dynamic=False,
                backend="aot_eager",
            )
            _check_program(subject, sample, compiled)


def check_compile_dynamic(subject: Subject, recorder: Recorder) -> None:
    """One program compiled with dynamic shapes serves a whole family of samples."""
    for name, family in subject.families().items():
        with recorder.running("compile_dynamic", f"family {name!r}"), quiet_dynamo():
            compilations = 0
            backend = torch._dynamo.lookup_backend("aot_eager")

            def counting(graph: Any, inputs: Any, backend: Any = backend) -> Any:
                nonlocal compilations
                compilations += 1
                return backend(graph, inputs)

            compiled = torch.compile(
                _plain_function(subject.function), fullgraph=True, dynamic=True, backend=counting
            )
            # The first call may compile twice: a float argument makes dynamo start again.
            _check_program(subject, family[0], compiled)
            first = compilations
            for sample in family[1:]:
                _check_program(subject, sample, compiled)
                require(compilations == first, f"{sample} was compiled anew")


def check_inductor(subject: Subject, recorder: Recorder) -> None:
    """``torch.compile`` with its default backend, which compiles what it can by itself."""
    for sample in subject.traced_samples[:_INDUCTOR_SAMPLES]:
        with recorder.running("inductor", sample), quiet_dynamo():
            compiled = torch.compile(_plain_function(subject.function), fullgraph=True)
            _check_program(subject, sample, compiled)


def check_export(subject: Subject, recorder: Recorder) -> None:
    """``torch.export``: each sample alone, and one program with dynamic shapes for a family."""
    for sample in subject.traced_samples:
        with recorder.running("export", sample), quiet_dynamo():
            program = _exported(subject, sample)
            _check_exported(subject, sample, program)
    for name, family in subject.families().items():
        with recorder.running("export", f"family {name!r}"), quiet_dynamo():
            dimensions = tuple(
                dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
                for tensor in family[0].tensors
            )
            program = _exported(subject, family[0], {"tensors": dimensions})
            for sample in family:
                _check_exported(subject, sample, program)


class _Program(torch.nn.Module):
    """A sample's call as a module whose inputs are the sample's tensors."""

    def __init__(self, function: Function, sample: Sample) -> None:
        super().__init__()
        self.function = function
        self.sample = sample

    def forward(self, *tensors: Tensor) -> Any:
        """Call the operator on other tensors than the sample's."""
        given = self.sample.with_tensors(tensors)
        return self.function(*given.args, **given.kwargs)


def _exported(
    subject: Subject, sample: Sample, dynamic_shapes: dict[str, Any] | None = None
) -> Callable[..., Any]:
    exported = torch.export.export(
        _Program(subject.function, sample),
        tuple(sample.copy().tensors),
        dynamic_shapes=dynamic_shapes,
    )
    return exported.module()


def _check_exported(subject: Subject, sample: Sample, program: Callable[..., Any]) -> None:
    copy = sample.copy()
    outputs = subject.run(copy, lambda *args, **kwargs: program(*copy.tensors))
    _compare(subject, sample, outputs)


def _check_program(subject: Subject, sample: Sample, compiled: Function) -> None:
    recorded = subject.recording(sample)
    outputs = subject.run(recorded, compiled)
    _compare(subject, sample, outputs)
    if subject.differentiable_tensors(sample):
        gradients = subject.gradients(recorded, outputs=outputs)
        if not sample.random:
            subject.compare_gradients(gradients, sample)


def _compare(subject: Subject, sample: Sample, outputs: list[Tensor]) -> None:
    if not sample.random:
        subject.compare(outputs, subject.expected(sample))
        return
    eager = subject.run(sample.copy())
    _require_same_form(outputs, eager, [output.device for output in eager])


def _plain_function(function: Function) -> Function:
    """A fresh function for each compilation: dynamo keeps its cache on the code it compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _placed_samples(subject: Subject) -> Iterable[Sample]:
    """Each traced sample in each layout: the strides of a result may depend on those it reads.

    A stride of zero says nothing of the order of dimensions, so it is for the other tensors to
    decide: each tensor is expanded while those are transposed.
    """
    for sample in subject.traced_samples_in_two_dtypes:
        for layout in LAYOUTS:
            yield sample.with_tensors(layout.place(tensor).tensor for tensor in sample.tensors)
        if sample.random:
            continue
        for position, tensor in enumerate(sample.tensors):
            fixed = (*subject.mutates, *subject.structural_inputs)
            if subject.names_of(sample)[position] in fixed:
                continue
            for axis in (axis for axis, size in enumerate(tensor.shape) if size > 1):
                tensors = [TRANSPOSED.place(other).tensor for other in sample.tensors]
                tensors[position] = expanded(tensor, axis).tensor
                yield sample.with_tensors(tensors)


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return torch.empty_strided(
            argument.size(), argument.stride(), dtype=argument.dtype, device="meta"
        )
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _require_same_form(
    actual: list[Tensor], expected: list[Tensor], devices: list[torch.device]
) -> None:
    require(len(actual) == len(expected), f"{len(actual)} results, not {len(expected)}")
    for position, (result, wanted, device) in enumerate(
        zip(actual, expected, devices, strict=True)
    ):
        form = (list(result.shape), result.dtype, _strides(result), result.device)
        real = (list(wanted.shape), wanted.dtype, _strides(wanted), device)
        require(form == real, f"result {position} is {form}; of real tensors it is {real}")


def _strides(tensor: Tensor) -> list[int | None]:
    """The strides that are ever used to address an element; PyTorch leaves the others open."""
    return [
        stride if size > 1 and tensor.numel() else None
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
