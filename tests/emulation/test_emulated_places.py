"""Where tensors of the CUDA operators lie and who reads them, in the calls of tools/gpu_check.py.

Host code that decides by the values of a tensor would wait for the device, and could not be
captured in a CUDA graph; a kernel on another stream or device than the tensors' would run too early
or fail. On a GPU tools/gpu_check.py shows that; here the emulated operators do.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from emulator import ROOT
from test_emulator import copy_with_change
from torch import Tensor

TOOLS = ROOT / "tools"
CPU = torch.device("cpu")
# Their one tensor is a number.
WITHOUT_DIMENSIONS = {"pkg::attention_dropout_mask"}
pytestmark = pytest.mark.checkout


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def emulated(func: Any) -> Any:
    """The operator over the emulator that has the name and overload of one of the package."""
    packet = getattr(getattr(torch.ops, emulator.NAMESPACE), func._schema.name.split("::")[1])
    return getattr(packet, func._overloadname)


class Device:
    """Has memory of its own, which an emulated library is told of while it is called."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.pkg_emulated_host_accesses.restype = ctypes.c_int64
        self.owned: set[int] = set()
        self.readers: list[str] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """With the same strides, on pages of its own; the tensor itself if it is empty."""
        import gpu_places

        if tensor.numel() == 0:
            return tensor
        count = emulator.extent(tensor) // tensor.element_size()
        whole = gpu_places.elements(count, tensor).copy_(tensor.as_strided((count,), (1,)))
        self.owned.add(whole.data_ptr())
        return whole.as_strided(tensor.shape, tensor.stride())

    def copies(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        self.owned.clear()
        return list(tensors), [self.copy(tensor) for tensor in tensors]

    def give(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        begin, size = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        self.library.pkg_emulated_give_to_device(begin, size)

    def operator(self, func: Any) -> Callable[..., Any]:
        """Notes where host code touches such memory."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.library.pkg_emulated_host_accesses()
            for each in (*args, *kwargs.values()):
                if isinstance(each, Tensor) and each.data_ptr() in self.owned:
                    self.give(each)
            try:
                return emulated(func)(*args, **kwargs)
            finally:
                self.library.pkg_emulated_take_from_device()
                if self.library.pkg_emulated_host_accesses() > before:
                    self.readers.append(func._schema.name)

        return call


def readers(library: Path, given: Sequence[Any]) -> tuple[list[str], set[str]]:
    """The operators whose host code touches a tensor, and those that were called."""
    import gpu_places

    device = Device(library)
    moves = {"tensors on the device": device.copies}
    with gpu_places.Elsewhere(moves, device.operator) as elsewhere:
        for call in given:
            call.run()
    assert elsewhere.faults == []
    return device.readers, elsewhere.compared


def kernels() -> set[str]:
    import gpu_ways

    return gpu_ways.kernels(CPU)


# Of all ways that a score may go; and fewer, as what is emulated five times takes its time.
WIDE_HEADS = r"attention of 130, (?!causal)"
OTHER_SCORES = rf"{WIDE_HEADS}|attention of 20, (?!causal|mask \(3, 3\))"
DEVICES = pytest.mark.parametrize(
    ("capability", "dtype"), [("80", torch.float32), ("90", torch.bfloat16)], ids=str
)


def calls_without(names: str, dtype: torch.dtype) -> list[Any]:
    import gpu_places

    return [each for each in gpu_places.small_calls(CPU, dtype) if not re.search(names, each.name)]


@pytest.mark.usefixtures("emulated_operators")
@DEVICES
def test_elements_beyond_31_bits(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype
) -> None:
    """Of all arguments, along each of their dimensions: the same bits as near each other."""
    import gpu_places

    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", capability)
    calls = calls_without(OTHER_SCORES, dtype)
    faults, compared = gpu_places.spread_beyond_31_bits(calls, emulated)
    assert faults == []
    assert compared == kernels() - WITHOUT_DIMENSIONS


@pytest.mark.usefixtures("emulated_operators")
@DEVICES
def test_host_code_touches_no_tensor(
    monkeypatch: pytest.MonkeyPatch,
    library_of_operators: Path,
    capability: str,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", capability)
    calls = calls_without(WIDE_HEADS, dtype)
    assert readers(library_of_operators, calls) == ([], kernels())


def test_a_touch_is_counted(library_of_operators: Path) -> None:
    device = Device(library_of_operators)
    tensor = device.copy(torch.full((7,), 2.0))
    before = device.library.pkg_emulated_host_accesses()
    device.give(tensor)
    assert tensor.sum() == 14
    device.library.pkg_emulated_take_from_device()
    assert tensor.sum() == 14
    assert device.library.pkg_emulated_host_accesses() == before + 1


def check_quantising(library: Path) -> None:
    """What the tests above ask, of one operator of a library in a process of its own."""
    import gpu_places

    torch.ops.load_library(library)
    calls = [each for each in gpu_places.small_calls(CPU) if each.name.startswith("quantize")]
    faults, compared = gpu_places.spread_beyond_31_bits(calls, emulated)
    assert compared
    assert readers(library, calls)[0] == [], "host code reads a tensor"
    assert faults == [], faults


PLANTED = {
    "no guard of the device": (
        "cuda/quantize_rowwise.cu",
        "const DeviceGuard guard(device_of(tensor).index);",
        "",
        "a kernel of whichever device is current",
    ),
    "the default stream": (
        "cuda/quantize_rowwise.cu",
        "current_stream(tensor);",
        "nullptr;",
        "on a stream that is not the current one",
    ),
    "values that the host reads": (
        "cuda/quantize_rowwise.cu",
        "problem.bits = plan.bits;",
        "problem.bits = plan.bits + (convert<float>(problem.input[0]) == 77.0f);",
        "host code reads a tensor",
    ),
    "strides of a dimension too many": (
        "cuda/quantize_rowwise.cu",
        "input.strides[plan.leading_dims];",
        "input.strides[plan.leading_dims + 1];",
        r"Assertion '__idx < size\(\)' failed",
    ),
    "strides of more dimensions than kernels take": (
        "cuda/quantize_rowwise.cu",
        "BatchStrides same = {};",
        "BatchStrides same = {}; same.strides[plan.leading_dims + kMaxBatchDims] = 0;",
        "runtime error: index .* out of bounds",
    ),
    "places of 31 bits": (
        "cuda/int4/quantize_rowwise.cuh",
        "batch_offset(problem.rows_of, problem.row_strides, row)),",
        "(batch_offset(problem.rows_of, problem.row_strides, row) & 0x7fffffff)),",
        "differs with arguments apart along dimension -2",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_seen(library_of_operators: Path, tmp_path: Path, fault: str) -> None:
    assert library_of_operators.exists()
    file, right, wrong, words = PLANTED[fault]
    copy_with_change(tmp_path, file, right, wrong)
    library = emulator.build_operators(tmp_path, "quantize_rowwise.cu")
    command = "import sys, test_emulated_places as t; t.check_quantising(sys.argv[1])"
    paths = [str(TOOLS), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", command, str(library)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode != 0
    assert re.search(words, result.stderr), result.stderr
