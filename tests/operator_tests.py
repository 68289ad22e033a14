"""The test that every operator passes: one pytest item for each check of check_op and device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from pkg.testing import ErrorSample, Report, Sample, check_op, checks_for

TRACING = (
    "samples",
    *("registration", "fake", "meta", "compile", "compile_dynamic", "inductor", "export"),
    *("autocast", "func", "jvp", "vmap"),
)
"""The checks that do not depend on the instruction set; ``-m 'not tracing'`` leaves them out."""

EVERY = int(os.environ.get("PKG_TEST_EVERY", "1"))
"""Of how many samples, and of how many parameters of any other test (conftest.py), one is taken.

By `make test`, for a first answer in minutes; and for what another run has proved of all: the
lesser CPU libraries, which are made of the same sources (`.ci/run`), and emulated processors
(tools/test_processors.py). `.ci/run` takes one of two, with one commit these and with the next
those, and .github/workflows/tests.yml all.
"""
FIRST = int(os.environ.get("PKG_TEST_FIRST", "0"))
"""The first that is taken, counted from 0; that is how the others get their turn."""

OF_ALL = ("samples", "compile_dynamic", "export")
"""The checks that look at samples together, and so always at all of them."""


class OperatorTests:
    """Base of the test class of one operator.

    A subclass in ``tests/ops/test_<operator>.py`` names the operator, its reference and its
    samples, and inherits the test. ``tests/test_every_operator.py`` looks for one of each.
    """

    op: ClassVar[torch._ops.OpOverload]
    reference: ClassVar[Callable[..., Any]]
    function: ClassVar[Callable[..., Any] | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    one_of: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Checks of hundreds of samples that would take minutes: of how many one is taken."""

    def samples(self) -> list[Sample]:
        raise NotImplementedError

    def errors(self) -> list[ErrorSample]:
        return []

    def on_device(self, sample: Sample, device: torch.device) -> Sample:
        """A sample made of the CPU's tensors, there.

        A backward operator's holds what the forward pass gave. One that is compared bit for bit
        with what a forward pass on the device is followed by has to hold that pass's results:
        they are as right as the CPU's, and rounded otherwise.
        """
        return sample.map_tensors(lambda tensor: tensor.to(device))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "check" in metafunc.fixturenames:
            checks = checks_for(self.options.get("without", ()))
            tracing = {check: pytest.mark.tracing for check in checks if check in TRACING}
            metafunc.parametrize(
                "check", [pytest.param(check, marks=tracing.get(check, ())) for check in checks]
            )

    def run(self, device: torch.device, checks: Sequence[str], **options: Any) -> Report:
        arguments: dict[str, Any] = {
            "reference": type(self).reference,
            "function": type(self).function,
            "errors": self.errors(),
            "device": device,
            "checks": checks,
            **self.options,
            **options,
        }
        fewest = min(self.one_of.get(check, 1) for check in checks)
        every = 1 if set(checks) & set(OF_ALL) else max(EVERY, fewest)
        samples = arguments.pop("samples", None)
        if samples is None:
            # The first is one that every check takes, however few are left.
            samples = sorted(self.samples(), key=lambda sample: sample.values_only)
            samples = samples[:1] + samples[1:][(FIRST - 1) % every :: every]
            samples = [self.on_device(sample, device) for sample in samples]
        return check_op(self.op, samples, **arguments)

    def test_check(self, device: torch.device, check: str) -> None:
        report = self.run(device, [check])
        assert list(report.runs) == [check]

    def test_tensors_on_two_devices_are_refused(self, device: torch.device) -> None:
        other = "meta" if device.type == "cpu" else "cpu"
        sample = self.samples()[0].converted(torch.float32).map_tensors(lambda t: t.to(device))
        function = type(self).function or self.op
        for position, tensor in enumerate(sample.tensors if len(sample.tensors) > 1 else []):
            tensors = sample.tensors
            tensors[position] = tensor.to(other)
            mixed = sample.with_tensors(tensors)
            with pytest.raises(RuntimeError, match="device"):
                function(*mixed.args, **mixed.kwargs)
