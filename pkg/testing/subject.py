"""The operator under test, and the ways to run it and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .report import require
from .samples import ErrorSample, Sample
from .tolerance import Expected, expect

Function = Callable[..., Any]


@dataclass
class Subject:
    """An operator with its samples, its reference and its declared properties."""

    op: torch._ops.OpOverload
    function: Function
    function_is_operator: bool
    reference: Function
    samples: list[Sample]
    errors: list[ErrorSample]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    mutates: tuple[str, ...]
    nondifferentiable_inputs: tuple[str, ...]
    nondifferentiable_outputs: tuple[int, ...]
    structural_inputs: tuple[str, ...]
    absent: tuple[str, ...]
    autocast: str
    max_ulps: float | None

    @property
    def name(self) -> str:
        """The operator's qualified name, as ``pkg::mul``."""
        return str(self.op._schema.name)

    @property
    def ways(self) -> list[Function]:
        """The ways to call the operator with the arguments of a sample."""
        return [self.function, self.op] if self.function_is_operator else [self.function]

    @property
    def differentiable(self) -> bool:
        """Whether the operator is declared to have gradients."""
        return "gradients" not in self.absent

    @cached_property
    def traced_samples(self) -> list[Sample]:
        """The samples for the checks that trace or compile, in one dtype each.

        That dtype is float32 where the sample is checked in it: the checks on dtypes are others.
        """
        return [sample.converted(self.usual_dtype(sample)) for sample in self._traced()]

    @cached_property
    def traced_samples_in_two_dtypes(self) -> list[Sample]:
        """The traced samples, and again in the last dtype, where PyTorch may compute in another."""
        last = [
            sample.converted(self.dtypes_of(sample)[-1])
            for sample in self._traced()
            if self.dtypes_of(sample)[-1] != self.usual_dtype(sample)
        ]
        return self.traced_samples + last

    def _traced(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.values_only]

    def usual_dtype(self, sample: Sample) -> torch.dtype | None:
        """The dtype for what does not depend on it: float32 where the sample is checked in that."""
        dtypes = self.dtypes_of(sample)
        return torch.float32 if torch.float32 in dtypes else dtypes[0]

    def dtypes_of(self, sample: Sample) -> tuple[torch.dtype | None, ...]:
        """The dtypes to check ``sample`` in; ``(None,)`` for "as it is"."""
        if not any(tensor.dtype == torch.float64 for tensor in sample.tensors):
            return (None,)
        return (self.dtypes if sample.dtypes is None else sample.dtypes) or (None,)

    def variants(self) -> Iterator[tuple[Sample, torch.dtype | None]]:
        """Every sample that is not random, in every dtype that it is checked in."""
        for sample in self.samples:
            if not sample.random:
                for dtype in self.dtypes_of(sample):
                    yield sample.converted(dtype), dtype

    def families(self) -> dict[str, list[Sample]]:
        """The traced samples that share one compiled program."""
        families: dict[str, list[Sample]] = {}
        for sample in self.traced_samples:
            if sample.family is not None:
                families.setdefault(sample.family, []).append(sample)
        return families

    def names_of(self, sample: Sample) -> list[str]:
        """The schema's name of the argument that each tensor of ``sample`` belongs to."""
        positions = [argument.name for argument in self.op._schema.arguments]
        named = list(zip(positions, sample.args, strict=False)) + list(sample.kwargs.items())
        return [
            name
            for name, argument in named
            for leaf in pytree.tree_leaves(argument)
            if isinstance(leaf, Tensor)
        ]

    def differentiable_tensors(self, sample: Sample) -> list[int]:
        """The positions in ``sample.tensors`` of those that gradients flow to."""
        if not (self.differentiable and sample.differentiable):
            return []
        fixed = (*self.mutates, *self.nondifferentiable_inputs)
        return [
            position
            for position, (name, tensor) in enumerate(
                zip(self.names_of(sample), sample.tensors, strict=True)
            )
            if tensor.is_floating_point() and name not in fixed
        ]

    def recording(self, sample: Sample, positions: Sequence[int] | None = None) -> Sample:
        """A copy of ``sample`` whose differentiable tensors, or those given, require grad."""
        if positions is None:
            positions = self.differentiable_tensors(sample)
        tensors = sample.copy().tensors
        return sample.with_tensors(
            tensor.detach().requires_grad_(position in positions)
            for position, tensor in enumerate(tensors)
        )

    def run(self, sample: Sample, function: Function | None = None) -> list[Tensor]:
        """Call the operator, or ``function``, on ``sample`` itself.

        Returns:
            the tensors returned, then the arguments that the operator mutates.
        """
        if sample.random:
            torch.manual_seed(0)
        returned = (function or self.function)(*sample.args, **sample.kwargs)
        if not self.op._schema.returns:
            returned = None  # A reference that writes into an argument may return it too.
        results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        named = zip(self.names_of(sample), sample.tensors, strict=True)
        return results + [tensor for name, tensor in named if name in self.mutates]

    def differentiable_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those outputs that gradients flow from."""
        return [
            output
            for position, output in enumerate(outputs)
            if output.is_floating_point() and position not in self.nondifferentiable_outputs
        ]

    def gradients(
        self, sample: Sample, function: Function | None = None, outputs: list[Tensor] | None = None
    ) -> list[Tensor]:
        """The gradients of a fixed random projection of the outputs.

        Args:
            sample: the arguments; gradients are taken for the tensors that require grad.
            function: called in place of the operator.
            outputs: the outputs, where they have been computed already.
        """
        outputs = self.run(sample, function) if outputs is None else outputs
        inputs = [tensor for tensor in sample.tensors if tensor.requires_grad]
        roots = self.differentiable_outputs(outputs)
        if function is self.reference:
            roots = [root for root in roots if root.requires_grad]
        if not roots:
            return [torch.zeros_like(tensor) for tensor in inputs]
        gradients = torch.autograd.grad(
            roots, inputs, [projection(root) for root in roots], allow_unused=True
        )
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, gradients, strict=True)
        ]

    def expected(self, sample: Sample) -> list[Expected]:
        """What the reference says of the outputs of ``sample``."""
        return expect(lambda given: self.run(given.copy(), self.reference), detached(sample))

    def expected_gradients(self, sample: Sample) -> list[Expected]:
        """What the reference says of the gradients of ``sample``."""
        positions = self.differentiable_tensors(sample)

        def evaluate(given: Sample) -> list[Tensor]:
            return self.gradients(self.recording(given, positions), self.reference)

        return expect(evaluate, detached(sample))

    def compare(
        self, actual: Sequence[Tensor], expected: Sequence[Expected], name: str = "output"
    ) -> None:
        """Raise AssertionError unless each result is within its bound."""
        require(
            len(actual) == len(expected),
            f"{len(actual)} {name} tensors; the reference gives {len(expected)}",
        )
        max_ulps = self.max_ulps if name == "output" else None
        for position, (result, wanted) in enumerate(zip(actual, expected, strict=True)):
            label = name if len(expected) == 1 else f"{name} {position}"
            wanted.compare(result, label, max_ulps)

    def compare_gradients(self, actual: Sequence[Tensor], sample: Sample) -> None:
        """Raise AssertionError unless the gradients of ``sample`` are within their bounds."""
        self.compare(actual, self.expected_gradients(sample), "gradient")


def projection(output: Tensor) -> Tensor:
    """A fixed direction in the space of an output, exact in every floating dtype.

    Eighths between -1 and 1, never zero: each element of the output counts.
    """
    generator = torch.Generator().manual_seed(output.numel())
    eighths = torch.randint(1, 9, output.shape, generator=generator) / 8
    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return (eighths * signs).to(output.dtype).to(output.device)


def detached(sample: Sample) -> Sample:
    """The sample without any tensor that requires grad."""
    return sample.map_tensors(Tensor.detach)


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Start and end with nothing compiled, so that no check sees another's programs."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
