"""tools/gpu_check.py: that its sample reaches every operator, and notices what goes wrong."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"
CPU = torch.device("cpu")
pytestmark = pytest.mark.checkout


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(TOOLS)
    import gpu_calls
    import gpu_ways

    return gpu_calls, gpu_ways


def test_the_sample_passes_on_the_cpu() -> None:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "sample", "--device", "cpu"]
    result = subprocess.run([*command, "--sizes", "3"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "in 2 ways, 0 faults" in result.stdout


def test_ways_that_attend_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is one way; here two are wrong, where the variable is not 0."""
    monkeypatch.syspath_prepend(TOOLS)
    import gpu_attention

    sizes = [(5, 9)], [(8, 16)]
    assert list(gpu_attention.ways_that_attend(CPU, *sizes)) == []
    right = gpu_attention.ops.scaled_dot_product_attention

    def wrong(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        result: torch.Tensor = right(*inputs, **options)
        is_other_way = os.environ.get(gpu_attention.VARIABLE) != "0"
        return result + 1 if is_other_way and result.dtype != torch.float64 else result

    monkeypatch.setattr(gpu_attention.ops, "scaled_dot_product_attention", wrong)
    faults = list(gpu_attention.ways_that_attend(CPU, *sizes))
    assert len(faults) == 2 * 2 * len(gpu_attention.features(1, 1, CPU))
    assert all("PKG_CUDA_WARPGROUPS is not 0" in fault for fault in faults)


def test_every_operator_is_called(sample: tuple[ModuleType, ModuleType]) -> None:
    """What tracing sees is what has a kernel; without the calls of a group its operators miss."""
    gpu_calls, gpu_ways = sample
    calls = list(gpu_calls.calls(CPU, [torch.float32], [3]))
    assert gpu_ways.kernels(CPU) >= {"pkg::lltm_backward", "pkg::attention_dropout_mask"}
    assert gpu_ways.never_called(calls, CPU) == []
    without = [call for call in calls if not call.name.startswith("rowwise_scaled_linear_s4s4")]
    assert gpu_ways.never_called(without, CPU) == ["pkg::rowwise_scaled_linear_s4s4"]


def test_faults_are_noticed(sample: tuple[ModuleType, ModuleType]) -> None:
    gpu_calls, gpu_ways = sample
    count = itertools.count()

    def refused() -> list[torch.Tensor]:
        raise RuntimeError("it waits")

    calls = [
        gpu_calls.Call("right", lambda: [torch.ones(2)]),
        gpu_calls.Call("random", lambda: [torch.rand(2)], is_random=True),
        gpu_calls.Call("infinite", lambda: [torch.ones(2) / 0]),
        gpu_calls.Call("counts", lambda: [torch.ones(1), torch.tensor([next(count)])]),
        gpu_calls.Call("refused", refused),
    ]
    assert list(gpu_ways.faults(calls, gpu_ways.ways_on(CPU))) == [
        "infinite: a result is not finite",
        "counts: results 1 of 2 differ from those of the first call",
        "refused: it waits",
    ]


def test_the_tensors_device_is_not_the_current_one(
    sample: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of two devices that are none, of which one call follows the current one."""
    gpu_calls, gpu_ways = sample
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    assert gpu_ways.of_another_device in gpu_ways.ways_on(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    calls = [
        gpu_calls.Call("right", lambda: [torch.ones(2)]),
        gpu_calls.Call("follows", lambda: [torch.tensor([current[0]])]),
    ]
    for count, faults in (1, []), (2, ["follows: results 0 of 1 differ where device 1 is"]):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        found = list(gpu_ways.faults(calls, [gpu_ways.of_another_device]))
        assert [fault.removesuffix(" the current one") for fault in found] == faults


def test_elements_that_are_far_apart_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator forgets a bit of a place that is beyond 31."""
    monkeypatch.syspath_prepend(TOOLS)
    import gpu_places

    calls = gpu_places.small_calls(CPU, torch.float32)
    pointwise = [each for each in calls if each.name.startswith(("mul:", "add_out"))]
    faults, compared = gpu_places.spread_beyond_31_bits(pointwise)
    assert (faults, compared) == ([], {"pkg::mul", "pkg::add_out"})

    def operator(func: Any) -> Any:
        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            if all(stride < 2**30 for stride in tensor.stride()):
                return tensor
            return tensor[:1].expand(tensor.shape)

        return func if "mul" not in func._schema.name else lambda a, b: func(narrow(a), b)

    faults, _ = gpu_places.spread_beyond_31_bits(pointwise, operator)
    assert faults == ["pkg::mul: result 0 differs with arguments apart along dimension -2"]


def test_ways_that_multiply_are_compared(
    sample: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU there is one way; here it is wrong where the variable is not 0."""
    _, gpu_ways = sample
    products = [(5, 16, 8)], [(33, 256, 8)]
    assert list(gpu_ways.ways_that_multiply(CPU, *products)) == []
    right = gpu_ways.ops.matmul

    def wrong(*operands: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        result: torch.Tensor = right(*operands, out_dtype=out_dtype)
        return result if os.environ.get(gpu_ways.WARPGROUPS) == "0" else result + 1

    monkeypatch.setattr(gpu_ways.ops, "matmul", wrong)
    faults = list(gpu_ways.ways_that_multiply(CPU, *products))
    # Four ways to lie in two types, into two types each; three batches; one of int8.
    assert len(faults) == 2 * (4 * 2 + 1) + 2
    assert all("differ where PKG_CUDA_WARPGROUPS is not 0" in fault for fault in faults)


def test_products_of_some_rows_are_compared(
    sample: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here those of one row are wrong."""
    _, gpu_ways = sample
    assert list(gpu_ways.ways_that_multiply_rows(CPU, [(150, 16, 8)])) == []
    right = gpu_ways.ops.matmul

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = right(a, b)
        return result + 1 if len(a) == 1 else result

    monkeypatch.setattr(gpu_ways.ops, "matmul", wrong)
    faults = list(gpu_ways.ways_that_multiply_rows(CPU, [(150, 16, 8)]))
    assert len(faults) == 4 * 2  # dtypes, layouts
    assert all("by 1 rows differs" in fault for fault in faults)


def test_products_in_tf32_are_compared(
    sample: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU no way is by TF32; here that one is wrong, and then six products are."""
    _, gpu_ways = sample
    before = gpu_ways.pkg.get_float32_matmul()
    assert list(gpu_ways.ways_that_multiply_float32(CPU, [(5, 16, 8)])) == []
    right = gpu_ways.ops.matmul

    def found_where(wrong_way: str) -> list[str]:
        def wrong(*operands: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
            result: torch.Tensor = right(*operands, out_dtype=out_dtype)
            return result + 1 if gpu_ways.pkg.get_float32_matmul() == wrong_way else result

        monkeypatch.setattr(gpu_ways.ops, "matmul", wrong)
        return list(gpu_ways.ways_that_multiply_float32(CPU, [(5, 16, 8)]))

    faults = found_where("high")
    # Four ways to lie, of two calls that are products alone, a batch, and random numbers.
    assert len(faults) == 4 * 2 + 1 + 1
    assert all("in TF32" in fault for fault in faults)
    faults = found_where("highest")
    assert len(faults) == 4 * 2 + 1 + 2  # and an infinity
    assert all("by six products" in fault for fault in faults)
    assert gpu_ways.pkg.get_float32_matmul() == before
