"""What ``pkg.accelerate`` leaves alone: PyTorch's result, errors and references, by either way.

Operators are registered once in a process, in C++ or, where PyTorch lacks what that needs, by way
of Python; so each way has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from resident_memory import needs_resident_bytes

needs_cpp = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this PyTorch does not tell C++ what its kernels refuse"
)
WAYS = pytest.mark.parametrize(
    "in_cpp",
    [pytest.param(True, id="C++", marks=needs_cpp), pytest.param(False, id="Python")],
)

COMMON = """
import sys

import torch

import pkg
from pkg import _accelerate_routes, _accelerate_table

in_cpp = sys.argv[1] == "True"
torch.manual_seed(0)
aten = torch.ops.aten
flash = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
several = torch._native_multi_head_attention

a = torch.randint(-9, 9, (24, 8), dtype=torch.int8)
b = torch.randint(-9, 9, (8, 8), dtype=torch.int8)
c = torch.randn(8, 8)
sides = [torch.randn(1, 2, 8, 16) for _ in range(3)]
mask = torch.randn(8, 8)
output, sums = flash(*sides, 0.0, False)
tokens = torch.randn(1, 8, 64)
parameters = [torch.randn(shape) for shape in ((192, 64), (192,), (64, 64), (64,))]

calls = {
    "_int_mm": lambda: torch._int_mm(a, b),
    "_int_mm.out": lambda: torch._int_mm(a, b, out=torch.empty(24, 8, dtype=torch.int32)),
    "_addmm_activation": lambda: torch._addmm_activation(c[0], c, c, alpha=0.5, use_gelu=True),
    "relu": lambda: torch._addmm_activation(c[0], c, c, beta=2),
    "attention": lambda: flash(*sides, 0.0, False),
    "attention, causal": lambda: flash(*sides, 0.0, True, scale=0.3),
    "attention, mask": lambda: flash(*sides, 0.0, False, attn_mask=mask),
    "backward": lambda: flash_backward(c.new_ones(1, 2, 8, 16), *sides, output, sums, 0.0, False),
    "backward, mask": lambda: flash_backward(
        *(c.new_ones(1, 2, 8, 16), *sides, output, sums, 0.0, False), attn_mask=mask, scale=0.3
    ),
    "heads": lambda: several(tokens, tokens, tokens, 64, 4, *parameters, None, False, True, None),
    "heads, weights": lambda: several(tokens, tokens, tokens, 64, 4, *parameters),
}
refused = {
    "int8 of a number": lambda: torch._int_mm(a[0, 0], b),
    "int8 of a vector": lambda: torch._int_mm(a, b[0]),
    "int8 of other sizes": lambda: torch._int_mm(a, b[:3]),
    "int8 of float": lambda: torch._int_mm(c, c),
    "int8 to float": lambda: torch._int_mm(a, b, out=torch.empty(24, 8)),
    "activation": lambda: torch._addmm_activation(c[0], c, c[:3]),
    "three dimensions": lambda: flash(*(each[0] for each in sides), 0.0, False),
    "one dimension": lambda: flash(*(each[0, 0, 0] for each in sides), 0.0, False),
    "dropout": lambda: flash(*sides, 0.5, False),
    "integers": lambda: flash(*(each.long() for each in sides), 0.0, False),
    "eight bits": lambda: flash(*(each.to(torch.float8_e5m2) for each in sides), 0.0, False),
    "the mask": lambda: flash(*sides, 0.0, False, attn_mask=mask[:, :5]),
    "five heads": lambda: several(tokens, tokens, tokens, 64, 5, *parameters, None, False),
    "two dimensions": lambda: several(*[tokens[0]] * 3, 64, 4, *parameters, None, False),
    "no batch": lambda: several(*[tokens[0, 0]] * 3, 64, 4, *parameters, None, False),
}
# Of the operators above by which a process that did not find PyTorch's kernels goes another way.
compiled = (
    "_int_mm",
    "_int_mm.out",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_native_multi_head_attention",
)


def tensors(results):
    return [each for each in (results if isinstance(results, tuple) else (results,))]


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error).partition("\\nException raised from")[0]
    return None


def accelerate():
    _accelerate_table.put({"ratios": [0.0] * len(_accelerate_routes.table())})
    _accelerate_routes.calls_pytorch_in_cpp = in_cpp
    pkg.accelerate()
    for name in compiled:
        dump = torch._C._dispatch_dump(f"aten::{name}")
        (line,) = [line for line in dump.splitlines() if line.startswith("CPU:")]
        assert ("aten.cpp" in line) == in_cpp, line
"""


def run(script: str, in_cpp: bool, is_silent: bool = True) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *["-W", "error"] * is_silent,
            "-c",
            COMMON + textwrap.dedent(script),
            str(in_cpp),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not is_silent


@WAYS
def test_results_are_pytorch_s_to_the_bit(in_cpp: bool) -> None:
    """With the switch on, and off again, with strides and what is None."""
    script = """
    expected = {name: tensors(call()) for name, call in calls.items()}
    accelerate()
    for is_on in (True, False):
        pkg.accelerate(is_on)
        for name, call in calls.items():
            _accelerate_routes.take_counts()
            found = tensors(call())
            counts = _accelerate_routes.take_counts()
            assert not any(each.taken for each in counts), name
            assert bool(counts) == is_on, name
            for theirs, ours in zip(expected[name], found, strict=True):
                assert (theirs is None) == (ours is None), name
                if theirs is not None:
                    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), name
    """
    run(script, in_cpp)


@WAYS
def test_errors_are_pytorch_s(in_cpp: bool) -> None:
    """With their class, which the C shim would lose."""
    script = """
    expected = {name: error_of(call) for name, call in refused.items()}
    assert all(expected.values()), expected
    assert {kind for kind, _ in expected.values()} > {RuntimeError}  # more than one class
    accelerate()
    for is_on in (True, False):
        pkg.accelerate(is_on)
        for name, call in refused.items():
            assert error_of(call) == expected[name], (name, error_of(call), expected[name])
    """
    run(script, in_cpp)


@needs_resident_bytes
@pytest.mark.long
@WAYS
def test_references_do_not_grow(in_cpp: bool) -> None:
    """Of 10^5 calls, refused ones too: a tensor that is kept would be 100 bytes a call at least."""
    script = """
    import weakref

    sys.path.append("tests")
    from resident_memory import least_growth

    accelerate()

    def repeat(count):
        for _ in range(count):
            for call in calls.values():
                call()
        for _ in range(count // 10):
            for call in refused.values():
                error_of(call)

    inputs = [a, b, c, *sides, mask, output, sums, tokens, *parameters]
    counts = [each._use_count() for each in inputs]
    with torch.inference_mode():
        repeat(500)
        growth = least_growth(lambda: repeat(33_000 // len(calls)))
    assert [each._use_count() for each in inputs] == counts
    assert growth < 1 << 20
    made = weakref.ref(calls["_int_mm"]())
    assert made() is None
    """
    run(script, in_cpp)


@needs_cpp
def test_a_schema_that_returns_something_else_is_python_s() -> None:
    """The name of a function of PyTorch's says the types of its arguments, not of its result."""
    script = """
    register = pkg._loader.cpu_library.pkg_accelerate_register
    register.restype = __import__("ctypes").c_bool
    assert not register(b"_int_mm", 2)
    assert not register(b"no_such_operator", 1)
    dump = torch._C._dispatch_dump("aten::_int_mm")
    assert "aten.cpp" not in dump
    _accelerate_routes._in_silence(lambda: register(b"_int_mm", 1))
    assert "aten.cpp" in torch._C._dispatch_dump("aten::_int_mm")
    """
    run(script, True)


def test_another_package_s_kernel_is_called_past_no_kernel_in_cpp() -> None:
    script = """
    import warnings

    library = torch.library.Library("aten", "IMPL")
    called = []
    names = ("_int_mm", "_native_multi_head_attention")
    for name in names:
        original = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

        def theirs(keys, *arguments, name=name, original=original):
            called.append(name)
            return original(keys, *arguments)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, theirs, "CPU", with_keyset=True, allow_override=True)
    _accelerate_table.put({"ratios": [0.0] * len(_accelerate_routes.table())})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pkg.accelerate()
    assert len(caught) == len(names), caught
    calls["_int_mm"]()
    calls["heads"]()
    assert called == [*names]
    """
    run(script, True, is_silent=False)
