"""What PyTorch makes of this machine: which kernel each operator gets, and how fast it is.

``python -m pkg doctor`` prints it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _loader, _pictures, tune
from .environment import processor_name

_SIZE, _BATCH, _LENGTH, _HEADS, _HEAD_SIZE, _WEIGHT = 512, 128, 512, 8, 64, 4096
_BATCHES = 16
_ROUNDS = 5
# Of the machine's peak, and of what PyTorch reaches in float32: below both it is a cliff.
_CLIFF_SHARE, _CLIFF_OF_FLOAT32 = 0.2, 0.5


@dataclass(frozen=True)
class Finding:
    """One operator with one dtype.

    Attributes:
        operator: what is computed, with its sizes.
        dtype: of the operands.
        kernel: what PyTorch runs it by: a primitive of oneDNN, a routine of MKL, or a loop of its
            own.
        pytorch: PyTorch's rate, in ``unit``.
        pkg: ours.
        peak: the machine's, measured by a micro-benchmark of the instructions that the loaded CPU
            library has for the dtype, or by reading memory.
        unit: ``GFLOP/s`` or ``GB/s``.
        is_cliff: far below the peak, and below what PyTorch itself reaches in float32.
    """

    operator: str
    dtype: str
    kernel: str
    pytorch: float
    pkg: float
    peak: float
    unit: str
    is_cliff: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`doctor` found.

    Attributes:
        machine: processor, CPU library, threads and PyTorch.
        findings: one for each operator and dtype.
    """

    machine: str
    findings: list[Finding]

    def __str__(self) -> str:
        """A table, with the cliffs below it."""
        head = ("operator", "dtype", "PyTorch runs", "PyTorch", "of peak", "pkg", "of peak", "")
        rows = [head, *(_row(each) for each in self.findings)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [self.machine]
        for row in rows:
            cells = zip(row, widths, range(len(head)), strict=True)
            lines.append(
                "  ".join(
                    text.ljust(width) if column < 3 else text.rjust(width)
                    for text, width, column in cells
                ).rstrip()
            )
        return "\n".join([*lines, *_words(self.findings)])


def doctor(picture: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Measures PyTorch's common operators, and ours in their place, against the machine's peak.

    It takes less than a minute, with PyTorch's present number of threads. What PyTorch runs an
    operator by is what oneDNN and MKL say of themselves in their verbose modes.

    Args:
        picture: A file to draw the shares of the peak into, of a format that Matplotlib knows by
            its ending; None for no picture.

    Returns:
        A :class:`Diagnosis`; ``print`` shows it as a table.

    Raises:
        ImportError: a picture is asked for and Matplotlib is missing, or the micro-benchmarks are,
            which are in the folder ``benchmarks`` of the sources and in every install.
        ValueError: ``picture`` has an ending that Matplotlib does not know.
    """
    if picture is not None:
        _pictures.matplotlib_figure()
        _pictures.check_ending(Path(picture))
    limits = _load("_limits").Limits()
    findings = []
    # The caller's may be off, and backward passes are measured too.
    with torch.inference_mode(False), torch.enable_grad(), tune.everything_ours():
        for case in _cases():
            findings.append(_find(case, limits))
    found = Diagnosis(_machine(), list(_with_cliffs(findings)))
    if picture is not None:
        _draw(found, Path(picture))
    return found


@dataclass(frozen=True)
class _Case:
    operator: str
    dtype: str
    work: float  # operations, or bytes where `limit` is memory
    limit: str
    call: Callable[[], object]


def _cases() -> Iterator[_Case]:
    floating = ("float64", "float32", "bfloat16", "float16")
    for dtype in (*floating, "int8"):
        yield _product(dtype)
    for dtype in floating:
        yield _one_row(dtype)
    for dtype in floating:
        yield _batch(dtype)
    for which in tune.PASSES:
        for dtype in floating:
            yield _attention(which, dtype)


def _product(dtype: str) -> _Case:
    a = tune.operand((_SIZE, _SIZE), dtype)
    b = tune.operand((_SIZE, _SIZE), dtype)
    call = torch._int_mm if dtype == "int8" else torch.mm
    return _Case(f"mm {_SIZE}³", dtype, 2.0 * _SIZE**3, dtype, lambda: call(a, b))


def _one_row(dtype: str) -> _Case:
    row, weight = tune.operand((1, _WEIGHT), dtype), tune.operand((_WEIGHT, _WEIGHT), dtype)
    name = f"linear, 1 row, {_WEIGHT}²"
    size = float(weight.numel() * weight.element_size())
    return _Case(name, dtype, size, "memory", lambda: torch.mm(row, weight.T))


def _batch(dtype: str) -> _Case:
    a, b = (tune.operand((_BATCHES, _BATCH, _BATCH), dtype) for _ in range(2))
    work = 2.0 * _BATCHES * _BATCH**3
    return _Case(f"bmm {_BATCHES} × {_BATCH}³", dtype, work, dtype, lambda: torch.bmm(a, b))


def _attention(which: str, dtype: str) -> _Case:
    shape = (1, _LENGTH, _HEADS, _HEAD_SIZE)
    query, key, value, grad = (tune.operand(shape, dtype).transpose(1, 2) for _ in range(4))
    attend = torch.nn.functional.scaled_dot_product_attention
    products = 2.0 * _HEADS * _LENGTH**2 * _HEAD_SIZE
    name = f"attention {_HEADS}×{_LENGTH}×{_HEAD_SIZE} {which}"
    if which == "forward":
        return _Case(name, dtype, 2 * products, dtype, lambda: attend(query, key, value))
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    output = attend(leaves[0], leaves[1], leaves[2])

    def backward() -> object:
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    return _Case(name, dtype, 5 * products, dtype, backward)


def _find(case: _Case, limits: Any) -> Finding:
    limit = limits.beside(case.limit)
    kernel = _kernel(case)
    ours = theirs = float("inf")
    for turn in range(_ROUNDS):
        ours = min(ours, tune.seconds_of(case.call, 1, ours=True))
        theirs = min(theirs, tune.seconds_of(case.call, 1, ours=False))
        limit(1)
        if turn >= 1 and theirs > 0.5:
            break
    unit = "GB/s" if case.limit == "memory" else "GFLOP/s"
    rates = (case.work / theirs / 1e9, case.work / ours / 1e9, limit.rate)
    return Finding(case.operator, case.dtype, kernel, *rates, unit)


def _with_cliffs(findings: list[Finding]) -> Iterator[Finding]:
    in_float32 = {each.operator: each.pytorch for each in findings if each.dtype == "float32"}
    for each in findings:
        is_low = each.pytorch < _CLIFF_SHARE * each.peak
        # Half of the bytes: a row times a matrix is twice as fast where memory bounds it.
        falls = each.pytorch < _CLIFF_OF_FLOAT32 * in_float32.get(each.operator, 0.0)
        yield Finding(**{**vars(each), "is_cliff": is_low and falls})


def _kernel(case: _Case) -> str:
    """What runs, in the words of the library that does: the first primitive that it tells of."""
    told = _told_by_libraries(lambda: tune.seconds_of(case.call, 1, ours=False))
    primitive = re.search(r"primitive,exec,cpu,(\w+),([^,]*),", told)
    if primitive is not None:
        name = primitive[2] or "gemm"
        return f"oneDNN {name.replace(':undef', '')}"
    routine = re.search(r"MKL_VERBOSE (\w*GEM\w*)\(", told)
    by = f"MKL {routine[1].lower()}" if routine is not None else "its own loop"
    return f"flash, {by}" if case.operator.startswith("attention") else by


def _told_by_libraries(call: Callable[[], object]) -> str:
    """What oneDNN and MKL write to the standard output of C while a call runs."""
    libc = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.cdll.msvcrt
    mkldnn, mkl = torch.backends.mkldnn, torch.backends.mkl
    sys.stdout.flush()
    libc.fflush(None)
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        try:
            os.dup2(file.fileno(), 1)
            with mkldnn.verbose(mkldnn.VERBOSE_ON), mkl.verbose(mkl.VERBOSE_ON):
                call()
        finally:
            libc.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode(errors="replace")


def _row(found: Finding) -> tuple[str, ...]:
    shares = (f"{100 * rate / found.peak:.0f} %" for rate in (found.pytorch, found.pkg))
    theirs, ours = shares
    return (
        *(found.operator, found.dtype, found.kernel),
        *(f"{found.pytorch:.1f} {found.unit}", theirs, f"{found.pkg:.1f} {found.unit}", ours),
        "CLIFF" if found.is_cliff else "",
    )


def _words(findings: list[Finding]) -> Iterator[str]:
    """The cliffs, in sentences."""
    for each in findings:
        if each.is_cliff:
            times = each.pkg / each.pytorch
            yield (
                f"cliff: {each.operator} in {each.dtype} runs by {each.kernel} at "
                f"{each.pytorch:.1f} {each.unit}, {100 * each.pytorch / each.peak:.0f} % of the "
                f"peak; pkg.accelerate() makes it {times:.1f} times as fast"
            )
    if not any(each.is_cliff for each in findings):
        yield "no cliffs: no operator is far below both the peak and PyTorch's float32"


def _machine() -> str:
    threads = torch.get_num_threads()
    return (
        f"{processor_name()}, CPU library {_loader.cpu_capability}, {threads} "
        f"thread{'s' if threads > 1 else ''}, PyTorch {torch.__version__}"
    )


def _load(name: str) -> Any:
    from .__main__ import load_benchmarks

    return load_benchmarks(name)


def _draw(found: Diagnosis, file: Path) -> None:
    """Bars of the shares of the peak, PyTorch's and ours, cliffs in red."""
    figure = _pictures.matplotlib_figure().Figure(figsize=(9, 0.36 * len(found.findings) + 1.4))
    axes = figure.add_subplot()
    rows = range(len(found.findings))
    theirs = [100 * each.pytorch / each.peak for each in found.findings]
    ours = [100 * each.pkg / each.peak for each in found.findings]
    colors = ["tab:red" if each.is_cliff else "tab:gray" for each in found.findings]
    axes.barh([row - 0.2 for row in rows], theirs, 0.4, color=colors, label="PyTorch (red: cliff)")
    axes.barh([row + 0.2 for row in rows], ours, 0.4, color="tab:blue", label="pkg")
    names = [f"{each.operator}, {each.dtype}" for each in found.findings]
    axes.set_yticks(list(rows), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(100, *theirs, *ours) * 1.02)
    axes.set_xlabel("% of the machine's peak")
    axes.set_title(found.machine, fontsize=8)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
