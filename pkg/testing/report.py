"""What was checked, how often, and what failed."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .samples import ErrorSample, Sample

_SHOWN_PER_CHECK = 3


class OperatorCheckError(AssertionError):
    """An operator failed a check; the message names the check, the sample and the dtype."""


@dataclass
class Report:
    """How often each check ran, so that a test can assert that none was skipped.

    Attributes:
        operator: the operator's qualified name.
        device: the device that it ran on.
        runs: for each check, the number of samples, dtypes and variants that passed through it.
        absent: the capabilities that were declared absent.
    """

    operator: str
    device: str
    runs: Counter[str] = field(default_factory=Counter)
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.runs.items())
        without = f"; without {', '.join(self.absent)}" if self.absent else ""
        return f"{self.operator} on {self.device}: {counts}{without}"


@dataclass
class Recorder:
    """Counts the runs of each check and keeps the failures until all checks have run."""

    report: Report
    failures: dict[str, list[str]] = field(default_factory=dict)
    causes: list[Exception] = field(default_factory=list)

    @contextmanager
    def running(
        self,
        check: str,
        sample: Sample | ErrorSample | str,
        dtype: torch.dtype | None = None,
        detail: str = "",
    ) -> Iterator[None]:
        """Count one run of ``check``; an exception inside becomes a failure of that run."""
        self.report.runs[check] += 1
        try:
            yield
        except Exception as error:
            where = f"sample {sample}" if dtype is None else f"sample {sample}, {dtype}"
            what = str(error) if isinstance(error, AssertionError) else _summary(error)
            detail = f", {detail}" if detail else ""
            self.failures.setdefault(check, []).append(f"[{check}] {where}{detail}: {what}")
            self.causes.append(error)

    def raise_failures(self) -> None:
        """Raise :class:`OperatorCheckError` with every failed check, if there is one."""
        if not self.failures:
            return
        lines = [f"{self.report.operator} on {self.report.device} failed"]
        for check, messages in self.failures.items():
            lines += messages[:_SHOWN_PER_CHECK]
            if len(messages) > _SHOWN_PER_CHECK:
                lines.append(f"[{check}] and {len(messages) - _SHOWN_PER_CHECK} more samples")
        raise OperatorCheckError("\n".join(lines)) from self.causes[0]


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``condition``; ``python -O`` keeps it."""
    if not condition:
        raise AssertionError(message)


def _summary(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {place.filename}:{place.lineno})"
