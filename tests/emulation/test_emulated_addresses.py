"""The CUDA operators whole, on the samples of their tests, under the sanitizers.

The programs that run the kernels allocate for them. Here the host code does, of which a sanitizer
of addresses sees that memory is as large as the kernels need, and lives as long. Python cannot load
that one late, and no process goes on after a report: each run has one of its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from emulator import SANITIZE_ADDRESSES, SANITIZE_UNDEFINED
from operator_collection import operator_classes
from quantised_samples import scales_and_zeros, words
from rowwise_scaled_samples import call as rowwise_call
from samples import normal
from test_emulated_operators import WARPGROUP_THREADS
from test_emulated_places import emulated
from test_emulator import copy_with_change
from test_every_operator import has_kernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pkg.testing import DTYPES, LAYOUTS, Layout, Sample

# Of an operator so many samples beside those of empty tensors, whose tensors have together so many
# elements at the most; of attention fewer, whose gradients take the emulator a second each.
SAMPLES, MOST_ELEMENTS = 8, 20000
OF_ATTENTION = (4, 1500)
CONTIGUOUS = LAYOUTS[0]
pytestmark = pytest.mark.checkout


class Emulated(TorchDispatchMode):
    """Calls the emulated operators in place of this package's, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("pkg::"):
            self.called.add(func._schema.name.removeprefix("pkg::"))
            func = emulated(func)
        return func(*args, **(kwargs or {}))


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """A copy in that layout, the last element of which ends an allocation."""
    strides = layout.strides(tensor.shape)
    like = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    count = emulator.extent(like) // like.element_size()
    memory = torch.zeros(layout.misalign + count, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, strides, layout.misalign).copy_(tensor)


def some_samples(name: str) -> Iterator[Sample]:
    """Of an operator a few of empty tensors, and others from the smallest on.

    Each is in a dtype and layout that chance has chosen, the same in every run.
    """
    choice = random.Random(name)
    tested = operator_classes()[name]
    of_all = tested.options.get("dtypes", DTYPES)
    wanted, most = OF_ATTENTION if name.startswith("scaled_dot") else (SAMPLES, MOST_ELEMENTS)

    def count(sample: Sample) -> int:
        return sum(tensor.numel() for tensor in sample.tensors)

    def is_empty(sample: Sample) -> bool:
        return any(tensor.numel() == 0 for tensor in sample.tensors)

    small = [each for each in tested().samples() if count(each) <= most]
    others = sorted((each for each in small if not is_empty(each)), key=count)
    empty = [each for each in small if is_empty(each)][:4]
    for sample in [*empty, *others[:: max(1, len(others) // wanted)]]:
        dtypes = of_all if sample.dtypes is None else sample.dtypes
        dtype = choice.choice(dtypes or (None,))
        layout = choice.choice((CONTIGUOUS, choice.choice(LAYOUTS)))
        yield sample.converted(dtype).map_tensors(lambda each, to=layout: laid_out(each, to))


def of_many_rows(name: str) -> Iterator[Sample]:
    """What warpgroups make of packed weights, whose samples have fewer rows."""
    sizes, sample = (65, 96, 24), None
    if name == "int4_linear":
        rows, depth, columns = sizes
        weight = (words(columns, depth, 2), scales_and_zeros(columns, depth, 32), 32, 2)
        sample = Sample((normal(rows, depth), *weight, normal(columns)))
    elif name.startswith("rowwise_scaled_linear"):
        sample = rowwise_call(sizes[:1], *sizes[1:], name.endswith("s4s4"))
    if sample is not None:
        for dtype in (torch.bfloat16, torch.float16):
            each = sample.converted(dtype)
            yield each.map_tensors(lambda tensor: laid_out(tensor, CONTIGUOUS))


def call_samples(library: str, *names: str) -> None:
    """Of the operators named, or of all; what is to be refused too, and not whether it is."""
    torch.ops.load_library(library)
    launched_threads = ctypes.CDLL(library).pkg_emulated_launched_threads
    names = names or tuple(operator_classes())
    mode, threads = Emulated(), set()
    for name in names:
        tested = operator_classes()[name]
        function = tested.function or tested.op
        samples = [*some_samples(name), *of_many_rows(name)]  # made with the help of operators
        with torch.no_grad(), mode:
            for sample in samples:
                print(f"{name}: {sample}", file=sys.stderr)
                function(*sample.args, **sample.kwargs)
                threads.add(launched_threads())
            for wrong in tested().errors():
                print(f"{name}: {wrong}", file=sys.stderr)
                with suppress(Exception):
                    tested.op(*wrong.args, **wrong.kwargs)
    # Attention itself is made of others.
    assert mode.called >= {each for each in names if has_kernel(each, "CPU")}
    if os.environ.get("PKG_EMULATED_CAPABILITY") == "90":
        assert WARPGROUP_THREADS in threads


def run_samples(library: Path, sanitize: Sequence[str], *names: str) -> tuple[int, str]:
    """Those calls in a process of their own: its exit status and what it has written."""
    environment = os.environ | emulator.OPTIONS
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if sanitize == SANITIZE_ADDRESSES:
        environment["LD_PRELOAD"] = emulator.preloaded()
    command = "import sys, test_emulated_addresses as t; t.call_samples(*sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", command, library, *names],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    return result.returncode, result.stderr


def require_sanitizers() -> None:
    reason = emulator.missing_compiler() or emulator.missing_preloads()
    if reason is not None:
        pytest.skip(reason)


# On the lesser device the other sanitizer watches test_emulated_operators.py.
@pytest.mark.parametrize(
    ("sanitize", "capability", "few_queries"),
    [
        (SANITIZE_ADDRESSES, "80", "0"),
        (SANITIZE_ADDRESSES, "90", "1"),
        (SANITIZE_UNDEFINED, "90", "0"),
    ],
    ids=["addresses, 8.0", "addresses, 9.0", "undefined, 9.0"],
)
def test_samples_of_every_operator(
    monkeypatch: pytest.MonkeyPatch, sanitize: Sequence[str], capability: str, few_queries: str
) -> None:
    """The samples of attention have few queries: in turn with kernels of their own and without."""
    require_sanitizers()
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", capability)
    monkeypatch.setenv("PKG_CUDA_FEW_QUERIES", few_queries)
    status, written = run_samples(emulator.build_operators(sanitize=sanitize), sanitize)
    assert status == 0, written[-5000:]


# The operators whose samples are called, the source that is compiled anew, and the change.
PLANTED = {
    "memory of parts that is too small": (
        SANITIZE_ADDRESSES,
        ("decode_attention",),
        "decode_attention.cu",
        "cuda/decode_attention.cu",
        "parts * (2 + call.value_size)",
        "parts * (1 + call.value_size)",
        "heap-buffer-overflow",
    ),
    "memory of parts that is given back before the kernels run": (
        SANITIZE_ADDRESSES,
        ("decode_attention",),
        "decode_attention.cu",
        "cuda/decode_attention.cu",
        "const Tensor parts = allocate_parts(call, query);",
        "allocate_parts(call, query);",
        "heap-use-after-free",
    ),
    "a kernel that does not wait for the one whose parts it adds up": (
        SANITIZE_ADDRESSES,
        ("decode_attention",),
        "decode_attention.cu",
        "cuda/attention/decode.cuh",
        "  wait_for_kernel_before();\n",
        "",
        "a kernel that does not wait for the one before",
    ),
    "a kernel that waits for one of another call": (
        SANITIZE_ADDRESSES,
        ("lltm_backward",),
        "lltm_backward.cu",
        "cuda/lltm_backward.cu",
        "that_waits(t + 1 < plan_.steps)",
        "that_waits()",
        "waits for the one before is the first of its call",
    ),
    "sums of one gate where there are three": (
        SANITIZE_ADDRESSES,
        ("lltm_backward",),
        "lltm_backward.cu",
        "cuda/lltm_backward.cu",
        "allocate({plan_.gates()}, kNumber)",
        "allocate({plan_.hidden}, kNumber)",
        "heap-buffer-overflow",
    ),
    "sizes that are gone": (
        SANITIZE_ADDRESSES,
        ("lltm_backward",),
        "lltm_backward.cu",
        "cuda/lltm_backward.cu",
        "return empty_contiguous({sizes.begin(), sizes.size()}, type,",
        "const auto list = [](std::initializer_list<int64_t> from) {\n"
        "      const std::vector<int64_t> each(from);\n"
        "      return std::span<const int64_t>(each);\n"
        "    };\n"
        "    return empty_contiguous(list(sizes), type,",
        "heap-use-after-free.*READ",
    ),
    "a product of sizes in 32 bits": (
        SANITIZE_UNDEFINED,
        ("quantize_rowwise",),
        "quantize_rowwise.cu",
        "cuda/quantize_rowwise.cu",
        "problem.inner = plan.inner;",
        "const int inner = static_cast<int>(plan.inner);\n"
        "    const int bytes = static_cast<int>(3'000'000 * plan.inner);\n"
        "    problem.inner = inner * bytes == 7 ? 0 : plan.inner;",
        "signed integer overflow",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_catches_a_fault_planted_in_host_code(tmp_path: Path, fault: str) -> None:
    require_sanitizers()
    sanitize, names, source, file, right, wrong, report = PLANTED[fault]
    copy_with_change(tmp_path, file, right, wrong)
    library = emulator.build_operators(tmp_path, source, sanitize)
    status, written = run_samples(library, sanitize, *names)
    assert status != 0
    assert re.search(report, written, re.DOTALL), written[-5000:]
