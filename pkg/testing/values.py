"""Checks of what an operator computes and of what it leaves alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .layouts import LAYOUTS, Guarded, Layout, expanded
from .report import Recorder, require
from .samples import Sample, same_bits
from .subject import Subject
from .tolerance import Expected

_REPEATS = 3
_THREADS = 4


def check_samples(subject: Subject, recorder: Recorder) -> None:
    """The samples cover what every operator must take; what they lack must be declared absent."""
    tensors = [tensor for sample in subject.samples for tensor in sample.tensors]
    families = subject.families().values()
    wanted = {
        "empty": any(tensor.numel() == 0 for tensor in tensors),
        "families": any(len(family) > 1 for family in families),
        "errors": bool(subject.errors),
    }
    for need, present in wanted.items():
        with recorder.running("samples", need):
            require(
                present or need in subject.absent,
                f"no sample for {need!r}; add one, or declare it with without={{{need!r}}}",
            )
            require(not (present and need in subject.absent), f"{need!r} is declared absent")
    with recorder.running("samples", "mutates"):
        arguments = subject.op._schema.arguments
        written = tuple(
            argument.name
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        require(
            written == subject.mutates,
            f"the schema says that {written} are mutated; mutates={subject.mutates}",
        )


def check_registration(subject: Subject, recorder: Recorder) -> None:
    """``torch.library.opcheck``: schema, autograd key, fake kernel, AOTAutograd dynamic shapes.

    The last, which takes ten times as long as the others, for one sample of each family and for
    the first without one: ``compile`` and ``export`` have AOTAutograd trace every sample.
    """
    families: set[str | None] = set()
    for sample in subject.traced_samples:
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if sample.family not in families:
            families.add(sample.family)
            checks.append("test_aot_dispatch_dynamic")
        with recorder.running("registration", sample):
            recorded = subject.recording(sample)
            if sample.random:
                torch.manual_seed(0)
            torch.library.opcheck(
                subject.op, recorded.args, dict(recorded.kwargs), test_utils=checks
            )


def check_values(subject: Subject, recorder: Recorder) -> None:
    """The outputs agree with the reference, through the function and through the dispatcher."""
    for sample, dtype in subject.variants():
        with recorder.running("values", sample, dtype):
            expected = subject.expected(sample)
            outputs = subject.run(sample.copy())
            subject.compare(outputs, expected)
            if subject.function_is_operator:
                dispatched = subject.run(sample.copy(), subject.op)
                _require_same(dispatched, outputs, "the dispatched operator")
            with torch.inference_mode():
                _require_same(subject.run(sample.copy()), outputs, "the result in inference mode")


def check_layouts(subject: Subject, recorder: Recorder) -> None:
    """Every layout of every tensor gives the same values, and no byte around it is written.

    In every dtype all tensors are laid out alike; in one of them, one tensor at a time.
    """
    for sample, dtype in subject.variants():
        expected = subject.expected(sample)
        count = len(sample.tensors)
        for layout in LAYOUTS:
            with recorder.running("layouts", sample, dtype, f"all {layout.name}"):
                _check_placed(subject, sample, [layout] * count, expected)
        if sample.values_only or dtype != subject.usual_dtype(sample):
            continue
        for position in range(count if count > 1 else 0):
            for layout in LAYOUTS[1:]:
                layouts = [LAYOUTS[0]] * count
                layouts[position] = layout
                detail = f"{subject.names_of(sample)[position]} {layout.name}"
                with recorder.running("layouts", sample, dtype, detail):
                    _check_placed(subject, sample, layouts, expected)
        _check_expanded(subject, recorder, sample, dtype)


def _check_expanded(
    subject: Subject, recorder: Recorder, sample: Sample, dtype: torch.dtype | None
) -> None:
    for position, tensor in enumerate(sample.tensors):
        name = subject.names_of(sample)[position]
        if name in (*subject.mutates, *subject.structural_inputs):
            continue
        for axis in range(tensor.dim()):
            if tensor.shape[axis] < 2:
                continue
            with recorder.running("layouts", sample, dtype, f"{name} expanded along {axis}"):
                placed = [LAYOUTS[0].place(other) for other in sample.tensors]
                placed[position] = expanded(tensor, axis)
                repeated = sample.with_tensors(guard.tensor for guard in placed)
                _check_guarded(subject, repeated, placed, subject.expected(repeated))


def _check_placed(
    subject: Subject, sample: Sample, layouts: Sequence[Layout], expected: Sequence[Expected]
) -> None:
    pairs = zip(layouts, sample.tensors, strict=True)
    placed = [layout.place(tensor) for layout, tensor in pairs]
    moved = sample.with_tensors(guard.tensor for guard in placed)
    _check_guarded(subject, moved, placed, expected)


def _check_guarded(
    subject: Subject, sample: Sample, guards: Sequence[Guarded], expected: Sequence[Expected]
) -> None:
    versions = [guard.tensor._version for guard in guards]
    subject.compare(subject.run(sample), expected)
    for name, guard, version in zip(subject.names_of(sample), guards, versions, strict=True):
        if name in subject.mutates:
            guard.assert_untouched_around(name)
            require(guard.tensor._version > version, f"the version of {name} was not advanced")
        else:
            guard.assert_untouched(name)
            require(guard.tensor._version == version, f"the version of {name} was advanced")


def check_determinism(subject: Subject, recorder: Recorder) -> None:
    """The same call gives the same bits, forward and backward."""
    for sample in subject.traced_samples:
        with recorder.running("determinism", sample):
            first = _forward_backward(subject, sample)
            for _ in range(_REPEATS):
                _require_same(_forward_backward(subject, sample), first, "a repeated call")


def check_threads(subject: Subject, recorder: Recorder) -> None:
    """Several Python threads at once get what one gets alone."""
    samples = [sample for sample in subject.traced_samples if not sample.random]
    with recorder.running("threads", f"{_THREADS} threads over {len(samples)} samples"):
        alone = [_forward_backward(subject, sample) for sample in samples]
        together = threading.Barrier(_THREADS)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                together.wait()
                for _ in range(_REPEATS):
                    for sample, expected in zip(samples, alone, strict=True):
                        actual = _forward_backward(subject, sample)
                        _require_same(actual, expected, f"{sample} in a thread")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def check_errors(subject: Subject, recorder: Recorder) -> None:
    """Wrong arguments are refused in words, and the operator goes on working."""
    call = subject.function if subject.function_is_operator else subject.op
    for wrong in subject.errors:
        with recorder.running("errors", wrong):
            message = None
            try:
                call(*wrong.args, **wrong.kwargs)
            except wrong.error as error:
                message = str(error)
            require(message is not None, f"no {wrong.error.__name__} was raised")
            matches = re.search(wrong.match, message or "") is not None
            require(matches, f"the message {message!r} does not match {wrong.match!r}")
    for sample in subject.traced_samples[:1]:
        with recorder.running("errors", sample, detail="after the errors"):
            subject.run(sample.copy())


def _forward_backward(subject: Subject, sample: Sample) -> list[Tensor]:
    recorded = subject.recording(sample)
    outputs = subject.run(recorded)
    if not subject.differentiable_tensors(sample):
        return outputs
    return outputs + subject.gradients(recorded, outputs=outputs)


def _require_same(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    require(
        len(actual) == len(expected), f"{what} gives {len(actual)} tensors, not {len(expected)}"
    )
    for position, (result, wanted) in enumerate(zip(actual, expected, strict=True)):
        require(same_bits(result, wanted), f"{what} differs in tensor {position}")
