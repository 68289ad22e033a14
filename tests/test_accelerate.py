"""``pkg.accelerate``: PyTorch's operators by our kernels, and everything else untouched."""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import accelerate_tables
import pytest
import torch
from accelerate_tables import filled
from resident_memory import least_growth, needs_resident_bytes
from torch import Tensor, nn

import pkg
from pkg import _accelerate_routes, _accelerate_table, tune
from pkg._accelerate_counts import Counts
from pkg.accelerate import Report
from pkg.testing import Sample, expect

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROWS, COLUMNS, INNER, BATCH = 33, 45, 70, 3
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def everything_is_ours() -> Iterator[None]:
    """A table by which our kernels take whatever they can; afterwards as it was."""
    with accelerate_tables.in_use(1e9):
        yield


def counts() -> dict[tuple[str, str], tuple[int, int]]:
    """Calls taken and left since the last time."""
    found = _accelerate_routes.take_counts()
    return {(each.operator, each.dtype): (each.taken, each.left) for each in found}


def operand(*shape: int, dtype: torch.dtype, layout: str = "rows") -> Tensor:
    """Of a layout: contiguous rows, contiguous columns, or neither."""
    if layout == "columns":
        return operand(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    if layout == "steps":
        return operand(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# Each takes the addend, a and b, matrices or batches of them.
CALLS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "mm": ("mm", lambda c, a, b: torch.mm(a[0], b[0])),
    "mm.out": ("mm", lambda c, a, b: torch.mm(a[0], b[0], out=torch.empty_like(c[0]))),
    "mm.out in columns": (
        "mm",
        lambda c, a, b: torch.mm(a[0], b[0], out=torch.empty_like(c[0].T.contiguous()).T),
    ),
    "bmm": ("bmm", lambda c, a, b: torch.bmm(a, b)),
    "bmm.out": ("bmm", lambda c, a, b: torch.bmm(a, b, out=torch.empty_like(c))),
    "addmm": ("addmm", lambda c, a, b: torch.addmm(c[0], a[0], b[0])),
    "addmm, a row": ("addmm", lambda c, a, b: torch.addmm(c[0, 0], a[0], b[0], alpha=-1)),
    "addmm, a column": ("addmm", lambda c, a, b: torch.addmm(c[0, :, :1], a[0], b[0], beta=2)),
    "addmm, columns": (
        "addmm",
        lambda c, a, b: torch.addmm(c[0].T.contiguous().T, a[0], b[0], beta=0.5, alpha=3),
    ),
    "addmm without the addend": (
        "addmm",
        lambda c, a, b: torch.addmm(torch.full_like(c[0], torch.nan), a[0], b[0], beta=0),
    ),
    "addmm.out": (
        "addmm",
        lambda c, a, b: torch.addmm(c[0], a[0], b[0], out=torch.empty_like(c[0])),
    ),
    "addmm.out in columns": (
        "addmm",
        lambda c, a, b: torch.addmm(c[0], a[0], b[0], out=torch.empty_like(c[0].T.contiguous()).T),
    ),
    "baddbmm": ("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.25, alpha=-2)),
    "baddbmm, one addend": ("baddbmm", lambda c, a, b: torch.baddbmm(c[:1], a, b)),
    "baddbmm.out": (
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, out=torch.empty_like(c)),
    ),
    "relu": (
        "_addmm_activation",
        lambda c, a, b: torch._addmm_activation(c[0, 0], a[0], b[0]),
    ),
    "gelu": (
        "_addmm_activation",
        lambda c, a, b: torch._addmm_activation(c[0, 0], a[0], b[0], use_gelu=True),
    ),
}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CALLS)
def test_results(name: str, dtype: torch.dtype) -> None:
    """Against PyTorch in float64, by the bound of a sum of INNER products and one rounding."""
    operator, call = CALLS[name]
    layouts = ["rows", "columns", "steps"]
    for a_layout, b_layout in itertools.product(layouts, layouts):
        a = operand(BATCH, ROWS, INNER, dtype=dtype, layout=a_layout)
        b = operand(BATCH, INNER, COLUMNS, dtype=dtype, layout=b_layout)
        c = operand(BATCH, ROWS, COLUMNS, dtype=dtype)
        expected = call(c.double(), a.double(), b.double())
        theirs = call(c, a, b)
        counts()
        with pkg.accelerate():
            actual = call(c, a, b)
        assert counts()[operator, str(dtype).removeprefix("torch.")] == (1, 0)
        assert actual.dtype == theirs.dtype
        assert actual.stride() == theirs.stride()
        # |alpha| is at most 3, |beta| 2; the activations' slopes are at most 1.13.
        size = 3 * (a.double().abs() @ b.double().abs()).amax() + 2 * c.double().abs().amax()
        unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        bound = 1.2 * (INNER + 8) * unit * size + torch.finfo(dtype).eps * expected.abs()
        assert (actual.double() - expected).abs().le(bound).all()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_int8(layout: str) -> None:
    a = torch.randint(-128, 128, (ROWS, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (64, 40), dtype=torch.int8)
    b = b if layout == "rows" else b.T.contiguous().T
    with pkg.accelerate():
        actual = torch._int_mm(a, b)
        given = torch._int_mm(a, b, out=torch.empty(ROWS, 40, dtype=torch.int32))
    assert counts()["_int_mm", "int8"] == (2, 0)
    expected = (a.long() @ b.long()).int()
    assert torch.equal(actual, expected)
    assert torch.equal(given, expected)


def test_what_python_registers_for_an_older_pytorch() -> None:
    """Before 2.13 mm and bmm are not the library's: the same functions, called by hand."""
    kernels = dict(_accelerate_routes._kernels())
    a, b = operand(2, 5, 6, dtype=torch.float32), operand(2, 6, 7, dtype=torch.float32)
    with pkg.accelerate():
        for name, left, right in (("mm", a[0], b[0]), ("bmm", a, b)):
            expected = left @ right
            out = torch.empty_like(expected)
            torch.testing.assert_close(kernels[name](left, right), expected)
            assert kernels[f"{name}.out"](left, right, out=out) is out
            torch.testing.assert_close(out, expected)
            with pytest.raises(RuntimeError, match=r"must be|shapes|size"):
                kernels[name](left, left)


def heads(length: int, dtype: torch.dtype, layout: str, count: int = 4) -> Tensor:
    """Of 2 sequences and so many heads 24 wide, as models lay them out."""
    if layout == "contiguous":
        return operand(2, count, length, 24, dtype=dtype)
    if layout == "heads inside":
        return operand(2, length, count, 24, dtype=dtype).transpose(1, 2)
    # A third of one joint projection.
    return operand(2, length, 3, count, 24, dtype=dtype)[:, :, 1].transpose(1, 2)


MASKS: dict[str, Callable[[torch.dtype], Tensor | None]] = {
    "none": lambda dtype: None,
    "causal": lambda dtype: None,
    "bool": lambda dtype: torch.rand(37, 37) > 0.3,
    "float": lambda dtype: operand(2, 1, 37, 37, dtype=dtype),
    "a row without keys": lambda dtype: (torch.arange(37) != 5)[:, None].expand(37, 37),
}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "joint"])
@pytest.mark.parametrize("kind", MASKS)
def test_attention(kind: str, layout: str, dtype: torch.dtype) -> None:
    """Results and gradients: at most as far from float64 as PyTorch's, by check_op's rule."""
    tensors = [heads(37, dtype, layout) for _ in range(3)]
    mask = MASKS[kind](dtype)
    upstream = heads(37, dtype, "heads inside")

    def run(sample: Sample) -> list[Tensor]:
        *inputs, attn_mask, gradient = sample.args
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=attn_mask, is_causal=kind == "causal"
        )
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    sample = Sample((*tensors, mask, upstream), {})
    theirs = run(sample)
    counts()
    with pkg.accelerate():
        ours = run(sample)
    found = counts()
    name = str(dtype).removeprefix("torch.")
    assert found[FLASH, name] == (1, 0)
    assert found[FLASH + "_backward", name] == (1, 0)
    for index, (wanted, actual) in enumerate(zip(expect(run, sample), ours, strict=True)):
        assert actual.stride() == theirs[index].stride(), index
        wanted.compare(actual, f"result {index}")


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_a_switch_between_the_passes_of_attention(first_is_ours: bool) -> None:
    """What one kernel's forward pass leaves is what the other's backward pass expects."""
    mask = (torch.rand(20, 20) > 0.3) & (torch.arange(20) != 3)[:, None]
    inputs = [heads(20, torch.float32, "heads inside").requires_grad_() for _ in range(3)]
    attend = nn.functional.scaled_dot_product_attention
    expected = torch.autograd.grad(attend(*inputs, attn_mask=mask).square().sum(), inputs)
    with pkg.accelerate(first_is_ours):
        loss = attend(*inputs, attn_mask=mask).square().sum()
    with pkg.accelerate(not first_is_ours):
        actual = torch.autograd.grad(loss, inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["none", "causal", "float"])
def test_attention_that_shares_heads(kind: str) -> None:
    query, upstream = (heads(37, torch.float32, "heads inside", 6) for _ in range(2))
    key, value = (heads(37, torch.float32, "contiguous", 2) for _ in range(2))
    mask = MASKS[kind](torch.float32)

    def run(sample: Sample) -> list[Tensor]:
        query, key, value, attn_mask, gradient = sample.args
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = forward(query, key, value, 0.0, kind == "causal", attn_mask=attn_mask)
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, query, key, value, out, sums, 0.0, kind == "causal"), attn_mask=attn_mask
        )
        return [out, *results]

    sample = Sample((query, key, value, mask, upstream), {})
    theirs = run(sample)
    counts()
    with pkg.accelerate():
        ours = run(sample)
    found = counts()
    assert found[FLASH, "float32"] == found[FLASH + "_backward", "float32"] == (1, 0)
    for index, (wanted, actual) in enumerate(zip(expect(run, sample), ours, strict=True)):
        assert actual.stride() == theirs[index].stride(), index
        wanted.compare(actual, f"result {index}")


REFUSED: dict[str, Callable[[], object]] = {
    "shapes": lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
    "a vector": lambda: torch.mm(torch.ones(2), torch.ones(2, 3)),
    "dtypes": lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64)),
    "bool": lambda: torch.mm(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2).bool()),
    "batches": lambda: torch.bmm(torch.ones(2, 2, 3), torch.ones(3, 3, 2)),
    "matrices to bmm": lambda: torch.bmm(torch.ones(2, 3), torch.ones(3, 2)),
    "batches to mm": lambda: torch.mm(torch.ones(1, 2, 3), torch.ones(1, 3, 2)),
    "the addend": lambda: torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 2)),
    "the addend's dtype": lambda: torch.addmm(
        torch.ones(2, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 2)
    ),
    "out": lambda: torch.mm(
        torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(2, 2, dtype=torch.float64)
    ),
    "baddbmm": lambda: torch.baddbmm(torch.ones(4), torch.ones(2, 2, 3), torch.ones(2, 3, 2)),
    "attention's shapes": lambda: getattr(torch.ops.aten, FLASH)(
        torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.ones(1, 2, 3, 4)
    ),
    "attention's mask": lambda: getattr(torch.ops.aten, FLASH)(
        *[torch.ones(1, 2, 3, 4)] * 3, attn_mask=torch.ones(3, 9)
    ),
    "int8": lambda: torch._int_mm(torch.ones(20, 8), torch.ones(8, 8)),
}


def error_of(call: Callable[[], object]) -> tuple[type[BaseException], str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    pytest.fail("it was not refused")


@functools.cache
def errors_of_pytorch() -> dict[str, tuple[str, str]]:
    """In a process in which nothing was ever registered."""
    script = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_accelerate as tests
        found = {{name: tests.error_of(call) for name, call in tests.REFUSED.items()}}
        print(repr({{name: (kind.__name__, words) for name, (kind, words) in found.items()}}))
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    errors: dict[str, tuple[str, str]] = ast.literal_eval(told.stdout)
    return errors


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_on", [True, False])
def test_errors_are_pytorch_s(name: str, is_on: bool) -> None:
    with pkg.accelerate(), pkg.accelerate(is_on):
        kind, words = error_of(REFUSED[name])
    assert (kind.__name__, words) == errors_of_pytorch()[name]


def alike(call: Callable[[], Tensor]) -> bool:
    """Whether PyTorch's kernel ran: the same bits, and nothing taken."""
    expected = call()
    counts()
    with pkg.accelerate():
        actual = call()
    taken = sum(taken for taken, _ in counts().values())
    return taken == 0 and torch.equal(torch.view_as_real(actual), torch.view_as_real(expected))


def test_complex_and_conjugated_tensors_are_left_alone() -> None:
    c = torch.randn(5, 5, dtype=torch.complex64)
    assert alike(lambda: torch.mm(c, c))
    assert alike(lambda: torch.mm(c.conj(), c.H))
    assert alike(lambda: torch.addmm(c, c.conj(), c))


def test_negated_tensors_are_resolved() -> None:
    n = torch.randn(5, 5, dtype=torch.complex64).conj().imag
    assert n.is_neg()
    with pkg.accelerate():
        torch.testing.assert_close(torch.mm(n, n), n.clone() @ n.clone())
        torch.testing.assert_close(torch.addmm(n, n, n), n.clone() + n.clone() @ n.clone())


def test_no_operand_is_read_where_alpha_is_zero() -> None:
    c, a = torch.ones(64, 64), torch.full((64, 64), torch.inf)
    with pkg.accelerate():
        assert torch.equal(torch.addmm(c, a, a, alpha=0), c)
        assert torch.equal(torch.baddbmm(c[None], a[None], a[None], alpha=0)[0], c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_factor_beyond_float32_is_refused_as_by_pytorch(dtype: torch.dtype) -> None:
    c, a = torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)
    with pkg.accelerate():
        for factor in (1e39, -1e300, 3.4028235e38):
            for words in ({"alpha": factor}, {"beta": factor}):
                with pytest.raises(RuntimeError, match="without overflow"):
                    torch.addmm(c, a, a, **words)
                with pytest.raises(RuntimeError, match="without overflow"):
                    torch.baddbmm(c[None], a[None], a[None], **words)
        assert torch.addmm(c, a, a, alpha=math.inf).eq(math.inf).all()


def test_an_output_that_is_an_input() -> None:
    a = operand(40, 900, dtype=torch.float32)
    b = operand(900, 40, dtype=torch.float32)
    c = operand(40, 40, dtype=torch.float32)
    expected = torch.addmm(c, a, b)
    with pkg.accelerate():
        torch.addmm(c, a, b, out=c)
    torch.testing.assert_close(c, expected)


def test_a_copy_on_write_output_gets_its_own_memory() -> None:
    base = torch.zeros(4, 4)
    lazy = torch._lazy_clone(base)
    with pkg.accelerate():
        torch.mm(torch.ones(4, 4), torch.ones(4, 4), out=lazy)
        assert torch.equal(base, torch.zeros(4, 4))
        lazy = torch._lazy_clone(base)
        torch.addmm(torch.ones(4), torch.ones(4, 4), torch.ones(4, 4), out=lazy)
    assert torch.equal(base, torch.zeros(4, 4))
    assert torch.equal(lazy, torch.full((4, 4), 5.0))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    a, b, c = torch.ones(rows, inner), torch.ones(inner, columns), torch.ones(columns)
    with pkg.accelerate():
        assert torch.equal(torch.mm(a, b), torch.zeros(rows, columns))
        assert torch.equal(torch.addmm(c, a, b), torch.ones(rows, columns))


class Tagged(Tensor):
    """A subclass, which keeps its type."""


def test_subclasses_and_fake_tensors() -> None:
    tagged = torch.randn(4, 4).as_subclass(Tagged)
    with pkg.accelerate():
        assert type(tagged @ tagged) is Tagged
        with torch._subclasses.FakeTensorMode():
            fake = torch.empty(3, 4)
            assert (fake @ fake.T).shape == (3, 3)
    assert (torch.empty(2, 3, device="meta") @ torch.empty(3, 2, device="meta")).shape == (2, 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 8))


def gradients(model: nn.Module, x: Tensor, autocast: torch.dtype | None) -> list[Tensor]:
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(x).float().square().sum()
    return list(torch.autograd.grad(loss, [*model.parameters()]))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_training(autocast: torch.dtype | None) -> None:
    model, x = network(), torch.randn(12, 20)
    theirs = gradients(model, x, autocast)
    counts()
    with pkg.accelerate():
        ours = gradients(model, x, autocast)
    name = str(autocast or torch.float32).removeprefix("torch.")
    found = counts()
    # Two forward products with a bias; of each weight the gradient; of the hidden layer's input.
    assert found["addmm", name] == (2, 0)
    assert found["mm", name] == (3, 0)
    unit = torch.finfo(autocast or torch.float32).eps
    for a, b in zip(ours, theirs, strict=True):
        # Roundings of the layers one after another, each of a few units.
        assert (a - b).norm() <= 16 * unit * b.norm()


def test_func_and_double_backward() -> None:
    a, b = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with pkg.accelerate():
        assert torch.autograd.gradcheck(torch.mm, (a, b))
        assert torch.autograd.gradgradcheck(torch.addmm, (a, a, b))
        stacked = torch.func.vmap(torch.mm)(a.expand(3, 4, 4), b.expand(3, 4, 4))
        torch.testing.assert_close(stacked[1], a @ b)


@pytest.mark.long
def test_compiled_and_exported_models() -> None:
    model, x = network().eval(), torch.randn(12, 20)
    expected = model(x)
    program = torch.export.export(model, (x,)).module()
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)
        counts()
        with pkg.accelerate():
            torch.testing.assert_close(compiled(x), expected)
            assert counts()["addmm", "float32"] == (2, 0)
            torch.testing.assert_close(program(x), expected)
            assert counts()["addmm", "float32"] == (2, 0)


@pytest.mark.long
def test_a_switch_in_a_compiled_region_is_refused_in_words() -> None:
    def step(x: Tensor) -> Tensor:
        with pkg.accelerate():
            return x @ x

    with pytest.raises(Exception, match=r"region that torch\.compile compiles"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2, 2))


@pytest.mark.long
def test_a_decorated_function_in_a_compiled_region() -> None:
    """Refused in words within a graph; between two it runs accelerated."""

    @pkg.accelerate
    def inner(x: Tensor) -> Tensor:
        return x @ x

    def step(x: Tensor) -> Tensor:
        return inner(x + 1) + 1

    x = torch.ones(8, 8)
    for function in (inner, step):
        with pytest.raises(Exception, match=r"region that torch\.compile compiles"):
            torch.compile(function, backend="eager", fullgraph=True)(x)
        counts()
        compiled = torch.compile(function, backend="eager")
        assert torch.equal(compiled(x), function(x))
        counts()
        compiled(x)
        assert counts()["mm", "float32"] == (1, 0)
    around = pkg.accelerate(torch.compile(lambda x: x @ x, backend="eager", fullgraph=True))
    around(x)
    assert counts()["mm", "float32"] == (1, 0)
    assert not is_on()


def is_on() -> bool:
    counts()
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    return counts().get(("mm", "float32")) == (1, 0)


def test_blocks_restore_what_was_before() -> None:
    assert not is_on()
    with pkg.accelerate():
        assert is_on()
        with pkg.accelerate(False):
            assert not is_on()
            with pkg.accelerate():
                assert is_on()
            assert not is_on()
        assert is_on()
    assert not is_on()
    pkg.accelerate()
    assert is_on()
    with contextlib.suppress(ZeroDivisionError), pkg.accelerate(False):
        assert not is_on()
        raise ZeroDivisionError
    assert is_on()
    pkg.accelerate(False)
    assert not is_on()


def test_blocks_that_overlap_leave_nothing_on() -> None:
    """As those of two threads do, the second of which is called before the first is entered."""
    first, second = pkg.accelerate(), pkg.accelerate()
    with first:
        pass
    with second:
        assert is_on()
    assert not is_on()
    pkg.accelerate()
    off, on, decorator = pkg.accelerate(False), pkg.accelerate(), pkg.accelerate(False)
    with on, off:
        assert not is_on()
    assert not is_on()
    decorator(is_on)
    assert is_on()
    with on:
        pass
    assert is_on()


def test_calls_that_nobody_can_take_back_are_forgotten() -> None:
    calls = importlib.import_module("pkg.accelerate")._calls
    held = pkg.accelerate()
    for _ in range(100):
        kept = pkg.accelerate(False)
        pkg.accelerate()
    assert len(calls) <= 4
    del kept
    with pkg.accelerate(False), held:
        assert len(calls) <= 2
    assert is_on()


@contextlib.contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next switch ends as where a signal handler raises."""
    switch = _accelerate_routes.switch

    def raises(*arguments: Any) -> None:
        monkeypatch.setattr(_accelerate_routes, "switch", switch)
        switch(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(_accelerate_routes, "switch", raises)
    with pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("report", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_block_that_a_signal_handler_interrupts_is_closed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: bool,
    is_open: bool,
) -> None:
    stack = contextlib.ExitStack()
    with pkg.accelerate(report=True):
        multiply(torch.float32)
        block = pkg.accelerate(report=report)
        if is_open:
            stack.enter_context(block)
            multiply(torch.float16)
        with interrupted(monkeypatch):
            stack.close() if is_open else stack.enter_context(block)
    assert not is_on()
    expected = {"float32": 1, "float16": 1} if is_open else {"float32": 1}
    assert reported(capsys.readouterr().out) == expected


def test_a_call_that_a_signal_handler_interrupts_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with interrupted(monkeypatch), pkg.accelerate():
        pass
    assert not is_on()
    pkg.accelerate()
    with interrupted(monkeypatch):
        pkg.accelerate(False)
    assert is_on()


def test_decorators() -> None:
    @pkg.accelerate
    def bare() -> bool:
        return is_on()

    @pkg.accelerate()
    def called() -> bool:
        return is_on()

    assert not is_on()
    assert bare()
    assert called()
    assert not is_on()
    assert bare.__name__ == "bare"


def test_each_step_of_a_generator_runs_accelerated() -> None:
    seen = []

    @pkg.accelerate
    def echo(first: str) -> Generator[str, str, str]:
        """Yields what it is sent."""
        value = first
        try:
            while value != "end":
                seen.append(is_on())
                try:
                    value = yield value
                except ZeroDivisionError:
                    value = "caught"
            return "done"
        finally:
            seen.append(is_on())

    def steps() -> Generator[str, str, str]:
        result = yield from echo("first")
        return result

    generator = steps()
    assert next(generator) == "first"
    assert not is_on()
    assert generator.send("second") == "second"
    assert generator.throw(ZeroDivisionError()) == "caught"
    assert not is_on()
    with pytest.raises(StopIteration) as end:
        generator.send("end")
    assert end.value.value == "done"
    closed = steps()
    next(closed)
    closed.close()
    assert seen == [True] * 6
    assert not is_on()
    assert echo.__doc__ == "Yields what it is sent."


def test_what_cannot_be_wrapped_is_refused_in_words() -> None:
    class Model:
        pass

    async def wait() -> None:
        pass

    async def waits() -> AsyncIterator[int]:
        yield 1

    def count() -> Iterator[int]:
        yield 1

    for wrap in (pkg.accelerate, lambda function: pkg.accelerate()(function)):
        with pytest.raises(TypeError, match="Model is a class"):
            wrap(Model)
        for function in (wait, waits):
            with pytest.raises(TypeError, match=r"waits? is an async function.*around what"):
                wrap(function)
        assert not is_on()
    with pytest.raises(TypeError, match=r"count is a generator function.*report=True"):
        pkg.accelerate(report=True)(count)
    with pytest.raises(TypeError, match=r"count is a generator function.*report=True"):
        pkg.accelerate(count, report=True)
    assert not is_on()


def test_a_staticmethod_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"is a staticmethod.*write @staticmethod above"):
        pkg.accelerate(staticmethod(torch.relu))


def test_an_output_of_many_dimensions_is_refused_as_by_pytorch() -> None:
    a = torch.ones(32, 32, dtype=torch.int8)
    with pkg.accelerate(), pytest.raises(RuntimeError, match=r"Expected result\.size\(0\)"):
        torch._int_mm(a, a, out=torch.empty([1] * 80, dtype=torch.int32))


def test_what_is_turned_on_without_torch_functions_is_on() -> None:
    script = """
import accelerate_tables, torch, pkg
with accelerate_tables.in_use(2.0):
    with torch._C.DisableTorchFunctionSubclass():
        pkg.accelerate()
    with pkg.accelerate(report=True) as block:
        torch.nn.functional.gelu(torch.randn(64, 64) @ torch.randn(64, 64))
        print(sum(each.taken for each in block.report().counts))
"""
    done = run(script, PYTHONPATH=str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    taken = 2 if torch._C._dispatch_has_kernel_for_dispatch_key("aten::gelu", "CPU") else 1
    assert int(done.stdout.splitlines()[0]) == taken


def test_an_async_function_behind_a_decorator_is_refused_where_it_is_called() -> None:
    """Not before: a decorator may well run what waits, and return when that is done."""

    @torch.no_grad()
    async def wait() -> None:
        pass

    for wrapped in (pkg.accelerate(wait), pkg.accelerate()(wait)):
        with pytest.raises(TypeError, match=r"wait is an async function.*around what"):
            wrapped()
    assert not is_on()


class Counting:
    """An object that is called as a generator function."""

    def __call__(self) -> Iterator[bool]:
        """Whether each step runs accelerated."""
        yield is_on()
        yield is_on()


class CountingModule(nn.Module):
    """A module that computes by steps."""

    def forward(self) -> Iterator[bool]:
        """Whether each step runs accelerated."""
        return (yield from Counting()())


class Waiting:
    """An object whose call has to be awaited."""

    async def __call__(self) -> None:
        """Does nothing."""


class WaitingModule(nn.Module):
    """A module whose call has to be awaited."""

    async def forward(self) -> AsyncIterator[int]:
        """Does nothing."""
        yield 1


@pytest.mark.parametrize("wrapped", [Counting(), CountingModule().forward])
def test_each_step_of_an_object_runs_accelerated(wrapped: Callable[[], Iterator[bool]]) -> None:
    for steps in (pkg.accelerate(wrapped)(), pkg.accelerate(functools.partial(wrapped))()):
        assert list(steps) == [True, True]
    assert not is_on()
    with pytest.raises(TypeError, match=r"\.(__call__|forward) is a generator function"):
        pkg.accelerate(wrapped, report=True)


@pytest.mark.parametrize("wrapped", [Waiting(), WaitingModule().forward])
def test_an_object_that_waits_is_refused_in_words(wrapped: Callable[[], object]) -> None:
    for refused in (wrapped, functools.partial(wrapped)):
        with pytest.raises(TypeError, match=r"\.(__call__|forward) is an async function"):
            pkg.accelerate(refused)
        with pytest.raises(TypeError, match=r"\.(__call__|forward) is an async function"):
            pkg.accelerate()(refused)
    assert not is_on()


def test_partial_functions_of_modules_are_known() -> None:
    assert list(pkg.accelerate(functools.partial(CountingModule()))()) == [True, True]
    with pytest.raises(TypeError, match=r"WaitingModule\.forward is an async function"):
        pkg.accelerate(functools.partial(WaitingModule()))


def test_a_module_is_refused_in_words() -> None:
    """Which a function around it would make one without ``eval`` and parameters."""
    layer = nn.Linear(8, 8)
    for wrap in (pkg.accelerate, lambda module: pkg.accelerate()(module)):
        with pytest.raises(TypeError, match=r"Linear is a module.*with pkg\.accelerate.*forward"):
            wrap(layer)
        assert not is_on()
    layer.forward = pkg.accelerate(layer.forward)
    counts()
    layer(torch.ones(8, 8))
    assert counts()["addmm", "float32"] == (1, 0)


def test_what_it_returns_says_whether_it_is_on() -> None:
    made = pkg.accelerate()
    assert repr(made) == "<pkg.accelerate(True): now on>"
    assert repr(pkg.accelerate(False)) == "<pkg.accelerate(False): now off>"
    assert repr(made) == "<pkg.accelerate(True): now off>"


def test_a_wrong_argument() -> None:
    with pytest.raises(TypeError, match="on is of type str; it must be a bool"):
        pkg.accelerate("yes")


def test_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    _accelerate_table.put(filled(3.0))
    with pkg.accelerate(report=True) as block:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        torch.mm(torch.ones(64, 64, dtype=torch.float16), torch.ones(64, 64, dtype=torch.float16))
        report = block.report()
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    by_dtype = {each.dtype: each for each in report.counts}
    assert by_dtype["float32"].taken == by_dtype["float16"].taken == 1
    assert by_dtype["float32"].seconds > 0
    assert by_dtype["float32"].saved == pytest.approx(2 * by_dtype["float32"].seconds, rel=1e-3)
    printed = capsys.readouterr().out
    assert "mm" in printed
    assert "float32" in printed
    assert "float16" not in printed


def test_a_report_is_aligned_and_ends_with_the_sum() -> None:
    """Operators have names of any length, and some have no estimate."""
    flash = Counts("_scaled_dot_product_flash_attention_for_cpu", "float32", [40, 1, 2000000, 0])
    step = Counts("optim.adam", "float32", [3, 0, 1000000, 0])
    mm = Counts("mm", "bfloat16", [1000, 2, 30500000, 12000000])
    step.saved = None
    _, header, *rows, total = str(Report([flash, step, mm])).splitlines()
    assert header.endswith("saved, about")
    assert len({*map(len, (header, *rows, total))}) == 1
    assert [row.split()[-1] for row in rows] == ["ms", "ms", "-"]
    assert total.split() == ["total", "1043", "3", "33.5", "ms", "12.0", "ms"]
    assert str(Report([step])).endswith("-")


def multiply(dtype: torch.dtype) -> None:
    torch.mm(torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))


def reported(printed: str) -> dict[str, int]:
    """The dtypes of a report, with the calls that ran here."""
    rows = (line.split() for line in printed.splitlines() if line.startswith("mm "))
    return {dtype: int(taken) for _, dtype, taken, *_ in rows}


def test_a_call_that_replaces_another_prints_the_report_of_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pkg.accelerate(report=True)
    multiply(torch.float32)
    pkg.accelerate(report=True)
    assert reported(capsys.readouterr().out) == {"float32": 1}
    multiply(torch.float16)
    pkg.accelerate(False)
    assert reported(capsys.readouterr().out) == {"float16": 1}
    pkg.accelerate(False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("report", [True, False])
def test_a_report_goes_on_after_a_block(capsys: pytest.CaptureFixture[str], report: bool) -> None:
    pkg.accelerate(report=True)
    with pkg.accelerate(report=report):
        multiply(torch.float16)
    assert reported(capsys.readouterr().out) == ({"float16": 1} if report else {})
    multiply(torch.float32)
    pkg.accelerate(False)
    expected = {"float32": 1} if report else {"float32": 1, "float16": 1}
    assert reported(capsys.readouterr().out) == expected


def test_a_block_s_report_goes_on_after_one_inside(capsys: pytest.CaptureFixture[str]) -> None:
    @pkg.accelerate(report=True)
    def inside() -> None:
        multiply(torch.float16)

    with pkg.accelerate(report=True):
        multiply(torch.float32)
        with pkg.accelerate(report=True):
            multiply(torch.float64)
        assert reported(capsys.readouterr().out) == {"float64": 1}
        inside()
        assert reported(capsys.readouterr().out) == {"float16": 1}
    assert reported(capsys.readouterr().out) == {"float32": 1}


def test_a_measurement_leaves_a_report_what_was_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pkg.accelerate(report=True):
        multiply(torch.float32)
        with tune.everything_ours():
            multiply(torch.float64)
    assert reported(capsys.readouterr().out) == {"float32": 1}


def test_what_pytorch_refuses_to_write_to_is_left_to_it() -> None:
    _accelerate_table.put(filled(0.0))
    a, out = torch.ones(4, 8, dtype=torch.int8), torch.empty(8, 4, dtype=torch.int32)
    with pkg.accelerate(), pytest.raises(RuntimeError, match="contiguous"):
        torch._int_mm(a, torch.ones(8, 8, dtype=torch.int8), out=out.mT)


def test_a_table_that_says_no_leaves_all_to_pytorch() -> None:
    _accelerate_table.put(filled(1.0))
    a = torch.ones(64, 64)
    with pkg.accelerate():
        torch.mm(a, a)
        torch.addmm(a, a, a)
    found = counts()
    assert found["mm", "float32"] == (0, 1)
    assert found["addmm", "float32"] == (0, 1)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_left_alone_is_pytorch_s_to_the_bit(name: str) -> None:
    """With the switch on, and off again, when PyTorch's kernels are called by way of ours."""
    _accelerate_table.put(filled(0.0))
    operator, call = CALLS[name]
    a = operand(BATCH, ROWS, INNER, dtype=torch.float32, layout="steps")
    b = operand(BATCH, INNER, COLUMNS, dtype=torch.float32, layout="columns")
    c = operand(BATCH, ROWS, COLUMNS, dtype=torch.float32)
    theirs = call(c, a, b)
    counts()
    with pkg.accelerate():
        left = call(c, a, b)
    assert counts()[operator, "float32"] == (0, 1)
    for ours in (left, call(c, a, b)):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert not counts()


@pytest.mark.parametrize("ratio", [0.0, 1e9])
def test_an_output_of_another_size_is_resized(ratio: float) -> None:
    _accelerate_table.put(filled(ratio))
    a, c = torch.randn(4, 4), torch.randn(4)
    with pkg.accelerate():
        for call in (torch.addmm, torch._addmm_activation):
            out = torch.empty(0)
            assert call(c, a, a, out=out) is out
            torch.testing.assert_close(out, call(c, a, a))
        wrong = torch.empty(4, 4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="type"):
            torch.addmm(c, a, a, out=wrong)


def test_the_measured_sizes_around_a_call_decide() -> None:
    """A measured size for itself; one between two of them only where both say so."""
    count = len(tune.products())
    flat = filled(0.0)["ratios"]
    places = {case: index for index, case in enumerate(tune.products())}

    def taken(case: tune.Product) -> bool:
        _accelerate_table.put({"ratios": flat})
        counts()
        with pkg.accelerate():
            case.call()()
        return counts()["mm" if case.family == "product" else "bmm", "float32"] == (1, 0)

    def says(case: tune.Product, ratio: float) -> None:
        for several in range(2):
            flat[several * count + places[case]] = ratio

    # A single row has no layout of its own.
    wanted = (case for case in places if case.dtype == "float32" and case.rows > 1)
    cases = [case for case in wanted if case.sources() == [case]]
    for case in [*cases[::5], *[case for case in cases if case.large()][::3]]:
        says(case, 9.0)
        assert taken(case), case
        between = case._replace(rows=case.rows + 1)
        larger = [rows for rows in _accelerate_routes.measured_sizes()[0] if rows > case.rows]
        if case.family == "product":
            # Next to the others the largest, which lies far off, says nothing.
            assert taken(between) == (len(larger) < 2), case
        if case.family == "product" and len(larger) == 1:
            between = case._replace(rows=2 * case.rows + 1)
            assert not taken(between), case
        if case.family == "product" and larger:
            says(case._replace(rows=larger[0]), 9.0)
            assert taken(between), case
            says(case._replace(rows=larger[0]), 0.0)
        says(case, 0.0)
        assert not taken(case), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_result_amid_others_is_all_that_is_written(dtype: torch.dtype) -> None:
    for columns in (7, 16, 17, 40, 63, 64, 65, 95, 97):
        for rows in (2, 6, 7, 13):
            a, b = torch.ones(rows, 5, dtype=dtype), torch.ones(5, columns, dtype=dtype)
            memory = torch.full((rows + 2, columns + 40), -1.0, dtype=dtype)
            counts()
            with pkg.accelerate():
                torch.mm(a, b, out=memory[1:-1, 20:-20])
            assert sum(taken for taken, _ in counts().values()) == 1
            assert (memory[1:-1, 20:-20] == 5).all()
            assert memory.sum() == 5 * rows * columns - (memory.numel() - rows * columns)


def assert_far_sizes_ask_more(table: Callable[[float], dict[str, Any]], far: int) -> None:
    """A ratio of 1.2 is not enough from ``far`` columns on."""
    a, b = torch.ones(4, 8), torch.ones(8, far)
    for ratio, is_taken in ((1.2, False), (1.4, True)):
        _accelerate_table.put(table(ratio))
        counts()
        with pkg.accelerate():
            torch.mm(a, b)
            torch.mm(a, b[:, : far - 1])
        assert counts()["mm", "float32"] == (1 + is_taken, 1 - is_taken)


def test_far_from_what_was_measured_more_is_asked() -> None:
    largest = _accelerate_routes.measured_sizes()[1][-1]
    assert_far_sizes_ask_more(filled, 2 * largest + 1)


def without_large_sizes(ratio: float) -> dict[str, Any]:
    """A table as they were before large sizes were measured."""
    products, attention = ([ratio] * count for count in (2 * 5 * 3 * 4**3, 2 * 4 * 3 * 4 * 3))
    return {"format": 1, "ratios": [[products] * 2, [attention] * 2]}


def test_a_table_without_large_sizes_decides_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def read(ratio: float) -> dict[str, Any]:
        _accelerate_table.save(without_large_sizes(ratio))
        file = _accelerate_table.cache_file()
        assert file is not None
        table = _accelerate_table._read(file)
        assert table is not None
        return table

    assert_far_sizes_ask_more(read, 2 * 1024 + 1)
    (first, _), (attention, _), (activations, _) = read(1.5)["ratios"]
    for case, ratio in zip(tune.products(), first, strict=True):
        assert ratio == (_accelerate_routes.NOT_MEASURED if case.large() else 1.5), case
    assert set(attention) == {1.5}
    assert set(activations) == {0.0}


def test_shipped_tables_can_be_read() -> None:
    files = list(_accelerate_table.SHIPPED.glob("*.json"))
    assert files
    for file in files:
        table = _accelerate_table._read(file)
        assert table is not None, file
        _accelerate_table.put(table)
    _accelerate_table.put(filled(0.0))


def test_what_stands_for_large_sizes() -> None:
    """One large size at a time, beside moderate ones; thin ones count for no more than smaller."""
    rows, columns, inner, *_ = _accelerate_routes.measured_sizes()
    head = tune.Product("product", "float32", "plain", 512, columns[-1], 1024)
    measured = head._replace(inner=256)
    assert head.sources() == [measured]
    assert measured.sources() == [measured]
    assert head._replace(inner=16).sources() == [measured, head._replace(columns=1024, inner=16)]
    wide = head._replace(columns=1024, inner=1024)
    assert head._replace(rows=rows[-1], inner=inner[-1]).sources() == [
        wide._replace(rows=rows[-1]),
        measured,
        wide._replace(inner=inner[-1]),
    ]
    moderate = wide._replace(rows=rows[-1], columns=256)
    assert moderate.sources() == [moderate._replace(inner=256)]


def test_a_cliff_is_not_measured_again_at_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tune.Product("product", "float16", "plain", 8, 256, 4096)
    ratios = {case.smaller(): 50.0}
    monkeypatch.setattr(tune, "_ratio", ratios.__getitem__)
    assert tune._measure_all([case], None) == [50.0]
    ratios.update({case.smaller(): 1.5, case: 1.2})
    assert tune._measure_all([case], None) == [1.2]


def test_pytorch_s_words_are_found() -> None:
    """Where they are not, every small call takes longer, and nothing else tells of it."""
    assert pkg._C._finds_tensor_words()


def test_threads_switch_while_others_compute() -> None:
    a = torch.randn(32, 32)
    expected = a @ a
    done = threading.Event()
    failures: list[object] = []

    def compute() -> None:
        while not done.is_set():
            if not torch.allclose(a @ a, expected, atol=1e-4):
                failures.append("mm")
            if not torch.allclose(torch.addmm(a, a, a), expected + a, atol=1e-4):
                failures.append("addmm")

    workers = [threading.Thread(target=compute) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in range(3000):
        with pkg.accelerate():
            pass
    done.set()
    for worker in workers:
        worker.join()
    assert not failures


@needs_resident_bytes
def test_switches_do_not_leak() -> None:
    for _ in range(1000):
        pkg.accelerate()
        pkg.accelerate(False)

    def switch() -> None:
        for _ in range(20_000):
            with pkg.accelerate():
                pass

    # A hundred bytes a switch would be 2 MB.
    assert least_growth(switch) < 1 << 20


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_nothing_happens_on_import_and_nothing_is_said() -> None:
    """In a process of its own, with warnings as errors: registration is silent on stderr too."""
    done = run("""
        import torch, pkg
        from pkg import _accelerate_table

        def ours(name):
            kernels = torch._C._dispatch_dump(name).splitlines()
            return not any("ATen" in line for line in kernels if line.startswith("CPU:"))

        assert not ours("aten::mm") and not ours("aten::addmm")
        count = len(pkg._accelerate_routes.table())
        _accelerate_table.put({"ratios": [9.0] * count})
        pkg.accelerate()
        assert ours("aten::mm") and ours("aten::addmm")
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_fork_s_report_is_of_its_own_calls(blocks: int) -> None:
    done = run(f"""
        import contextlib, os, warnings
        import torch, pkg
        from pkg import _accelerate_table

        def multiply(dtype):
            torch.mm(torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))

        torch.set_num_threads(1)
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        _accelerate_table.put({{"ratios": [9.0] * len(pkg._accelerate_routes.table())}})
        with contextlib.ExitStack() as stack:
            for _ in range({blocks}):
                stack.enter_context(pkg.accelerate(report=True))
                multiply(torch.float32)
            if not {blocks}:
                pkg.accelerate(report=True)
                multiply(torch.float32)
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                print("the parent's", flush=True)
            multiply(torch.float64 if child else torch.float16)
    """)
    assert done.returncode == 0, done.stderr
    of_child, of_parent = done.stdout.split("the parent's\n")
    assert reported(of_child) == {"float16": 1}
    assert reported(of_parent) == {"float32": 1, "float64": 1}


def test_another_package_s_kernel_is_told_of_and_goes_on_being_called() -> None:
    done = run("""
        import warnings
        import torch
        library = torch.library.Library("aten", "IMPL")
        called = []
        original = torch.library.get_kernel("aten::mm", "CPU").call_boxed

        def theirs(keys, a, b):
            called.append(1)
            return original(keys, a, b)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("mm", theirs, "CPU", with_keyset=True, allow_override=True)
        import pkg
        pkg._accelerate_table.put({"ratios": [0.0] * len(pkg._accelerate_routes.table())})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pkg.accelerate()
        assert "another package" in str(caught[0].message), caught
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        assert called
    """)
    assert done.returncode == 0, done.stderr


def size_of(case: tune.Case) -> float:
    """A number of each entry of a table: a product's columns, attention's queries."""
    if isinstance(case, tune.Activation):
        return float(1 + tune.CURVES.index(case.curve))
    return float(case[-2])


def test_tables_are_kept_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured where there is none, with a tiny measurement in the place of the minute's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(tune, "_ratio", size_of)
    monkeypatch.setattr(tune, "_CLIFF", math.inf)
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    with threads(2):
        _accelerate_table.use()
    assert "several threads yet; doing so, once, takes a minute or two" in capsys.readouterr().err
    file = _accelerate_table.cache_file()
    assert file is not None
    kept = json.loads(file.read_text())
    assert kept["torch"] == torch.__version__
    (first, second), attention, activations = kept["ratios"]
    assert attention[0] == [float(case.queries) for case in tune.attentions()]
    for case, ratio in zip(tune.products(), first, strict=True):
        measured = [float(source.columns) for source in case.sources()]
        assert ratio == min(measured, default=0.0), case
        assert bool(measured) != (case.dtype == "int8" and case.layout == "left transposed")
    assert activations[0] == [size_of(case) for case in tune.activations()]
    assert list(_accelerate_routes.table()) == list(
        itertools.chain(first, second, *attention, *activations)
    )
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    monkeypatch.setattr(tune, "measure", lambda: pytest.fail("measured again"))
    _accelerate_table.use()
    assert capsys.readouterr().err == ""


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """With so many threads of PyTorch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_table_of_one_thread_is_not_taken_for_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new_process: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(tune, "_ratio", lambda case: 1.0 + torch.get_num_threads())
    monkeypatch.setattr(_accelerate_table, "_in_use", None)

    def largest() -> list[float]:
        """Of each half for products."""
        half = len(tune.products())
        place = list(_accelerate_routes.table())
        return [max(place[:half]), max(place[half : 2 * half])]

    with threads(1):
        _accelerate_table.use()
        assert largest() == [2.0, 0.0]
    with threads(2):
        if is_new_process:
            monkeypatch.setattr(_accelerate_table, "_in_use", None)
        _accelerate_table.use()
        assert torch.get_num_threads() == 2
    monkeypatch.setattr(tune, "measure", lambda: pytest.fail("measured again"))
    for count in (1, 2):
        monkeypatch.setattr(_accelerate_table, "_in_use", None)
        with threads(count):
            _accelerate_table.use()
        assert largest() == [2.0, 3.0]


def test_the_user_s_table_of_one_thread_stays_in_use_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several threads the package's serves; each half has what is enough for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path)
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    one, several = measured(2.0, [1, 1], [1.03, 1.03]), measured(3.0, [1, 2], [1.05, 1.06])
    own, shipped = _accelerate_table.save(one), tmp_path / _accelerate_table.name()
    shipped.write_text(json.dumps(several))

    def described(*tables: str) -> bool:
        return _accelerate_table.description().splitlines() == [*tables]

    half = len(tune.products())
    with threads(1):
        _accelerate_table.use()
        assert list(_accelerate_routes.table()[: 2 * half]) == [2.0] * half + [0.0] * half
        assert described(f"{own} (2026-11-28, 1 thread)")
    with threads(2):
        _accelerate_table.use()
        assert described(
            f"{own} (2026-11-28, 1 thread)", f"{shipped} (2026-11-28, 1 and 2 threads)"
        )
    assert list(_accelerate_routes.table()[: 2 * half]) == [2.0] * half + [3.0] * half
    assert list(_accelerate_routes.enough()) == pytest.approx([1.03, 0.97, 1.06, 0.94])
    monkeypatch.setattr(_accelerate_table, "_find", lambda _: pytest.fail("looked for again"))
    with threads(1):
        _accelerate_table.use()


def measured(ratio: float, counts: list[int], least: list[float]) -> dict[str, Any]:
    """A table as it is measured, that says the same of everything."""
    kinds = tune.kinds()
    return {
        "format": _accelerate_table.FORMAT,
        "threads": counts,
        "date": "2026-11-28",
        "least": least,
        "ratios": [[[ratio] * len(cases)] * 2 for cases in kinds],
    }


def test_no_table_is_described_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path / "none")
    assert _accelerate_table.description().startswith("none; pkg.accelerate() measures one")


def test_a_measurement_that_is_interrupted_leaves_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ratio(case: object) -> float:
        if torch.get_num_threads() == 1:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(tune, "_ratio", ratio)
    with threads(2):
        with pytest.raises(KeyboardInterrupt):
            tune.measure(quiet=True)
        assert torch.get_num_threads() == 2


def test_the_first_use_is_apart_from_the_user_s_device_and_random_numbers(tmp_path: Path) -> None:
    done = run(
        """
        import pathlib, torch, pkg
        from pkg import _accelerate_table, tune

        _accelerate_table.SHIPPED = pathlib.Path("none")
        ratio, measured = tune._ratio, set()

        def quick(case):
            if case.group not in measured:
                measured.add(case.group)
                assert ratio(case) > 0
            return 1.0

        tune._ratio = quick
        before = torch.get_rng_state()
        with torch.device("meta"):
            pkg.accelerate()
            assert torch.empty(1).is_meta
        assert torch.equal(torch.get_rng_state(), before)
        assert "attention backward float16" in measured, measured
        """,
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("least", "taken"), [({"least": [1.04, 1.06]}, 1), ({"least": [1.06, 1.04]}, 2), ({}, 0)]
)
def test_a_table_says_from_which_ratio_on_calls_are_taken(
    least: dict[str, list[float]], taken: int
) -> None:
    """By the number of threads; a table that does not, as all did once, from a tenth on."""
    _accelerate_table.put({**filled(1.05), **least})
    for count in (1, 2):
        with threads(count), pkg.accelerate(report=True) as block:
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            (found,) = block.report().counts
        assert found.taken == (count == taken)


@pytest.mark.parametrize(
    ("below", "above", "least", "is_taken"),
    [
        (1.0, 1.1, [1.04, 1.04], True),  # 1.05 is expected in the middle
        (1.0, 1.1, [1.06, 1.06], False),
        (1.05, 1.3, None, False),  # a table of before: both have to say so
        (1.15, 1.3, None, True),
        (0.97, 1.3, [1.04, 1.04], True),
        (0.95, 1.3, [1.04, 1.04], False),  # further below 1 than noise is
    ],
)
def test_between_two_measured_sizes_a_ratio_between_theirs_is_expected(
    below: float, above: float, least: list[float] | None, is_taken: bool
) -> None:
    place = filled(below)["ratios"]
    rows = _accelerate_routes.measured_sizes()[0]
    for index, case in enumerate([*tune.products()] * 2):
        if case.rows == rows[2]:
            place[index] = above
    _accelerate_table.put({"ratios": place} | ({"least": least} if least else {}))
    middle = round(math.sqrt(rows[1] * rows[2]))
    with pkg.accelerate(report=True) as block:
        torch.mm(torch.ones(middle, 64), torch.ones(64, 64))
        (found,) = block.report().counts
    assert found.taken == is_taken


def test_how_far_a_measurement_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is measured again, of the entries that are near 1 and were measured themselves."""
    cases = tune.attentions()[:200]
    again = {case: 1.2 * (1 + 0.001 * index) for index, case in enumerate(cases[::2])}
    monkeypatch.setattr(tune, "_ratio", again.__getitem__)
    monkeypatch.setattr(tune, "_AGAIN", len(cases))
    ratios = [1.2, 2.0] * (len(cases) // 2)  # those of 2 are not measured again
    found = tune._scatter(dict(zip(cases, ratios, strict=True)))
    assert found == pytest.approx(0.001 * (9 * (len(again) - 1) // 10))
    assert tune._scatter(dict.fromkeys(cases, 2.0)) == 0


def test_a_damaged_table_is_said_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    monkeypatch.setattr(tune, "measure", lambda: filled(2.0))
    file = _accelerate_table.cache_file()
    assert file is not None
    file.parent.mkdir(parents=True)
    for damaged in ("{", json.dumps({**filled(2.0), "least": ["much", 1.1]})):
        file.write_text(damaged)
        monkeypatch.setattr(_accelerate_table, "_in_use", None)
        _accelerate_table.use()
        said = capsys.readouterr().err
        assert f"the table {file} is damaged" in said
        assert "one is measured instead" in said
        assert json.loads(file.read_text()) == filled(2.0)
    shipped = tmp_path / _accelerate_table.name()
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path)
    shipped.write_text(json.dumps(filled(3.0)))
    file.write_text("{")
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    _accelerate_table.use()
    assert "the package's own table is used instead" in capsys.readouterr().err
    assert _accelerate_table._in_use == filled(3.0)


def test_a_cache_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert _accelerate_table._read(tmp_path / "file" / "table.json") is None
    assert capsys.readouterr().err == ""

    def refuse(*_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert _accelerate_table._read(tmp_path / "file") is None
    said = capsys.readouterr().err
    assert f"the table {tmp_path / 'file'} cannot be read (Permission denied)" in said
    assert "damaged" not in said


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _accelerate_table.save(filled(1.0)) is None
    assert "cannot be kept" in capsys.readouterr().err


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user whom the system has no entry of."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "USERPROFILE", "HOMEPATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform != "win32":
        monkeypatch.setattr("pwd.getpwuid", unknown)


def test_the_package_s_table_serves_without_a_home(
    tmp_path: Path,
    no_home: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_accelerate_table, "SHIPPED", tmp_path)
    monkeypatch.setattr(_accelerate_table, "_in_use", None)
    (tmp_path / _accelerate_table.name()).write_text(json.dumps(filled(3.0)))
    pkg.accelerate(False)
    assert _accelerate_table._in_use is None
    pkg.accelerate()
    assert _accelerate_table._in_use == filled(3.0)
    assert capsys.readouterr().err == ""


def test_a_measurement_without_a_home_says_where_it_could_be_kept(
    tmp_path: Path,
    no_home: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tune, "measure", tune_table)
    monkeypatch.setattr(_accelerate_table, "put", lambda _: None)
    monkeypatch.setattr(tune, "_MOST_OF_OTHERS", math.inf)
    assert tune.main() == 1
    said = capsys.readouterr()
    assert "cannot be kept (you have no home directory)" in said.err
    assert "set XDG_CACHE_HOME to a folder" in said.err
    assert "kept in" not in said.out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.main() == 0
    file = tmp_path / "pkg-kernels" / "accelerate" / _accelerate_table.name()
    said = capsys.readouterr().out
    assert f"kept in {file}, which pkg.accelerate() uses from now on; delete it to undo" in said
    assert "other processes used" in said
    assert json.loads(file.read_text()) == tune_table()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what others do")
def test_a_disturbed_measurement_is_kept_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> dict[str, Any]:
        time.sleep(0.1)  # some ticks of the clock that tells what others do
        return tune_table()

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(_accelerate_table, "put", lambda _: None)
    monkeypatch.setattr(tune, "_MOST_OF_OTHERS", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.main() == 1
    assert "not kept: it would decide by what other" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert tune.main(keeps_disturbed=True) == 0
    assert "kept in" in capsys.readouterr().out


def test_what_is_measured_is_what_runs() -> None:
    """Some quick cases by the real clock, with every family's operator."""
    _accelerate_table.put(filled(0.0))
    cases = [
        *(
            tune.Product("product", dtype, "right transposed", 64, 16, 64)
            for dtype in _accelerate_routes.DTYPES
        ),
        tune.Product("batch", "float32", "plain", 8, 16, 16),
        tune.Attention("backward", "float32", "mask", 64, 64),
    ]
    counts()  # of what ran before
    with tune.everything_ours():
        for case in cases:
            assert tune._ratio(case) > 0
        taken = {name for (name, _), (taken, _) in counts().items() if taken}
    assert taken == {"mm", "bmm", "_int_mm", FLASH + "_backward"}
    assert set(_accelerate_routes.table()) == {0.0}
    assert not is_on()
    text = "\n".join(tune.summary(tune_table()))
    assert "product int8" in text
    assert "attention backward float16" in text


def tune_table() -> dict[str, Any]:
    return {
        "processor": "one",
        "capability": "avx2",
        "torch": "2.13",
        "date": "today",
        "threads": [1, 2],
        "ratios": [[[1.0] * len(cases)] * 2 for cases in tune.kinds()],
    }
