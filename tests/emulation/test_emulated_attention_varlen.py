"""The attention kernels on packed sequences, run on the CPU by the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import philox
import pytest
import references
import test_emulated_attention as attention
import torch
from emulator import Argument, Emulator
from test_emulated_attention import (
    DTYPES,
    MOST_SHARED_BYTES,
    SEED,
    Call,
    name_of,
    some_of_each_dtype,
)
from torch import Tensor

import pkg

Operators = torch._ops._OpNamespace
Lengths = tuple[int, ...]
INTEGERS = [torch.int32, torch.int64]


@dataclass(frozen=True)
class SequenceCall(Call):
    """One sequence of a packed batch as a call of its own, keys and queries of all heads."""

    first_batch: int = 0

    def kept(self) -> Tensor:
        batch = self.first_batch + self.batch.numel()
        mask = philox.kept(int(SEED), batch, self.rows, self.columns, self.dropout)
        return mask[self.first_batch :].view(*self.batch, self.rows, self.columns)


@dataclass(frozen=True)
class PackedCall:
    """The arguments of one call, with the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    most: tuple[int, int]
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: Tensor | None = None  # of the heads, or of sequences and heads

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def batch(self) -> tuple[int, int, int]:
        return len(self.cu_seqlens_q) - 1, self.key.shape[1], self.group

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    def sequences(self) -> list[tuple[slice, slice, SequenceCall]]:
        """Queries and keys of each sequence, and the sequence alone."""
        edges = (pairwise(each.tolist()) for each in (self.cu_seqlens_q, self.cu_seqlens_k))
        calls = []
        for index, both in enumerate(zip(*edges, strict=True)):
            rows, columns = (
                slice(begin, min(end, begin + most))
                for (begin, end), most in zip(both, self.most, strict=True)
            )
            lengths = (rows.stop - rows.start, columns.stop - columns.start)
            mask = None
            if self.is_causal:
                mask = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
            call = SequenceCall(
                self.query[rows].transpose(0, 1),
                self.key[columns].transpose(0, 1),
                self.value[columns].transpose(0, 1),
                mask,
                # Query heads in groups, as the call's output has them.
                self.grad_output[rows].transpose(0, 1).unflatten(0, (-1, self.group)),
                self.dropout,
                scale=self.scale,
                enable_gqa=True,
                window=self.window,
                softcap=self.softcap,
                slopes=references.slopes_of_sequence(self.slopes, index),
                first_batch=index * self.query.shape[1],
            )
            calls.append((rows, columns, call))
        return calls


def make(
    rows: Lengths,
    columns: Lengths,
    heads: tuple[int, int] = (2, 2),
    sizes: tuple[int, int] = (4, 5),
    dtype: torch.dtype = torch.float32,
    offsets: torch.dtype = torch.int32,
    **options: object,
) -> PackedCall:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    return PackedCall(
        values(sum(rows), heads[0], sizes[0]),
        values(sum(columns), heads[1], sizes[0]),
        values(sum(columns), heads[1], sizes[1]),
        values(sum(rows), heads[0], sizes[1]),
        torch.tensor([0, *accumulate(rows)], dtype=offsets),
        torch.tensor([0, *accumulate(columns)], dtype=offsets),
        (max(rows, default=0), max(columns, default=0)),
        **options,  # type: ignore[arg-type]
    )


def packed_operand(name: str, tensor: Tensor, group: int) -> dict[str, Argument]:
    """A tensor (tokens, heads, size), of which ``group`` query heads have each a matrix."""
    row, head, column = tensor.stride()
    strides = (0, head * group, head) if group > 0 else (0, head, 0)
    return {
        name: tensor,
        f"{name}_strides": (row, column),
        f"{name}_batch_strides": strides,
        f"{name}_owned": (1, 1, int(group > 0)),
    }


def arguments_of(call: PackedCall) -> dict[str, Argument]:
    arguments: dict[str, Argument] = {
        "type": name_of(call.dtype),
        "batch": call.batch,
        "tokens": (len(call.query), len(call.key)),
        "rows": min(call.most[0], len(call.query)),
        "columns": min(call.most[1], len(call.key)),
        "head_size": call.query.shape[2],
        "value_size": call.value.shape[2],
        "scale": 1 / math.sqrt(call.query.shape[2]) if call.scale is None else call.scale,
        "is_causal": call.is_causal,
        "window": call.window,
        "softcap": call.softcap,
        "dropout": float(call.dropout),
        "seed": SEED,
    }
    if call.slopes is not None:
        sequence, head = (0, *call.slopes.stride())[-2:]
        arguments["slopes"] = call.slopes
        arguments["slopes_type"] = name_of(call.slopes.dtype)
        arguments["slopes_strides"] = (sequence, head * call.group, head)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = getattr(call, name)
        arguments[name] = offsets
        arguments[f"{name}_type"] = name_of(offsets.dtype)
        arguments[f"{name}_stride"] = offsets.stride(0)
    arguments |= packed_operand("query", call.query, call.group)
    arguments |= packed_operand("key", call.key, 0)
    return arguments | packed_operand("value", call.value, 0)


def emulated(
    emulator: Emulator,
    call: PackedCall,
    blocks: int = 3,
    joint: bool = False,
    warpgroups: bool = False,
    copied_panels: bool = False,
) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of query, key and value.

    By products of warpgroups (``warpgroups``), or those of copied panels (``copied_panels``), where
    the kernels for them take the call.
    """
    arguments = arguments_of(call) | {"warpgroups": warpgroups}
    arguments |= {"copied_panels": int(copied_panels), "key_parts": 1}
    accumulator = torch.float64 if call.dtype == torch.float64 else torch.float32
    output = torch.full(call.grad_output.shape, 77, dtype=call.dtype)
    log_sum_exp = torch.full((call.query.shape[1], len(call.query)), 77, dtype=accumulator)
    arguments |= packed_operand("output", output, call.group) | {"log_sum_exp": log_sum_exp}
    names = ["output", "log_sum_exp"]
    if attention.has_residual(call.dtype):
        arguments |= packed_operand("output_residual", output.clone(), call.group)
        names.append("output_residual")
    arguments["most_shared_bytes"] = 227 * 1024 if copied_panels else MOST_SHARED_BYTES
    size = {"zeroed_size": call.value.shape[2]}
    emulator.run("attention_uncovered_queries", names, blocks, **arguments, **size)
    emulator.run("attention_forward", names, blocks, **arguments)

    arguments |= packed_operand("grad_output", call.grad_output, call.group)
    arguments["delta"] = torch.full_like(log_sum_exp, 77)
    emulator.run("attention_delta", ["delta"], blocks, **arguments)
    gradients = [torch.full_like(each, 77) for each in (call.query, call.key, call.value)]
    given = packed_operand("grad_query", gradients[0], call.group)
    # Not of the forward pass, and with the head's size.
    zeroed: dict[str, Argument] = {
        "output": gradients[0],
        "log_sum_exp": None,
        "output_residual": None,
    }
    zeroed["zeroed_size"] = call.query.shape[2]
    emulator.run("attention_uncovered_queries", ["output"], blocks, **arguments | zeroed)
    names = ["grad_key", "grad_value"]
    of_keys = packed_operand("grad_key", gradients[1], 0)
    of_keys |= packed_operand("grad_value", gradients[2], 0)
    emulator.run("attention_uncovered_keys", names, blocks, **of_keys, **arguments)
    if joint:
        given |= of_keys
        names.append("grad_query")
        emulator.run("attention_joint_gradients", names, blocks, **given, **arguments)
    else:
        emulator.run("attention_grad_query", ["grad_query"], blocks, **given, **arguments)
        emulator.run("attention_grad_key_value", names, blocks, **of_keys, **arguments)
    return [output, log_sum_exp, *gradients]


def compare(call: PackedCall, results: list[Tensor]) -> None:
    """Each sequence with the exact results of that sequence alone."""
    output, log_sum_exp, grad_query, grad_key, grad_value = results
    names = ["output", "log_sum_exp", "grad_query", "grad_key", "grad_value"]
    uncovered = [torch.ones(len(each), dtype=torch.bool) for each in (call.query, call.key)]
    for rows, columns, alone in call.sequences():
        uncovered[0][rows] = uncovered[1][columns] = False
        own = [output[rows], log_sum_exp[:, rows].mT, grad_query[rows]]
        own += [grad_key[columns], grad_value[columns]]
        if alone.rows == 0 or alone.columns == 0:
            assert all((each == 0).all() for each in (own[0], *own[2:]))
            assert (own[1] == -torch.inf).all()
            continue
        exact = attention.exact_results(alone)
        bounds = attention.bounds_of(alone, exact)
        for name, result, value, bound in zip(names, own, exact, bounds, strict=True):
            actual = result.transpose(0, 1).reshape(value.shape)
            error = (actual.double() - value).abs()
            assert ((error <= bound) | (actual == value)).all(), f"{name} of {rows}, {columns}"
    of_rows, of_columns = uncovered
    for result in (output[of_rows], grad_query[of_rows]):
        assert (result == 0).all()
    assert (log_sum_exp[:, of_rows] == -torch.inf).all()
    for result in (grad_key[of_columns], grad_value[of_columns]):
        assert (result == 0).all()


def check(
    emulator: Emulator, call: PackedCall, blocks: int = 3, joint: bool = False
) -> list[Tensor]:
    results = emulated(emulator, call, blocks, joint)
    compare(call, results)
    return results


def heads_outside(call: PackedCall) -> PackedCall:
    def arrange(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    names = ("query", "key", "value", "grad_output")
    return replace(call, **{name: arrange(getattr(call, name)) for name in names})


def spread(call: PackedCall) -> PackedCall:
    """Offsets with a stride, and last dimensions that are not contiguous."""

    def apart(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]

    names = ("query", "key", "value", "grad_output", "cu_seqlens_q", "cu_seqlens_k")
    return replace(call, **{name: apart(getattr(call, name)) for name in names})


def uncovered(call: PackedCall) -> PackedCall:
    """Without the first and the last sequence, whose tokens stay."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    return replace(call, **{name: getattr(call, name)[1:-1] for name in names})


CALLS = {
    "one token": lambda: make((1,), (1,)),
    "tiles": lambda: make((63, 64, 65, 129), (65, 64, 63, 1)),
    "empty ones": lambda: make((0, 5, 0, 70, 3), (4, 0, 0, 66, 7)),
    "causal": lambda: make((70, 3, 130, 1), (70, 129, 65, 66), is_causal=True),
    "causal, more queries than keys": lambda: make((140, 9), (5, 0), is_causal=True),
    "window": lambda: make((70, 3, 130, 1), (70, 129, 65, 66), window=(40, 2)),
    "window, causal": lambda: make((140, 9), (75, 70), is_causal=True, window=(64, -1)),
    "window of all": lambda: make((70, 3), (5, 129), window=(2**63 - 1, 2**63 - 1)),
    "softcap": lambda: make((9, 70), (66, 5), softcap=0.8),
    "slopes": lambda: make((9, 70), (66, 5), (6, 2), slopes=torch.rand(6)),
    "all": lambda: make(
        *((9, 70), (66, 5), (6, 2)),
        is_causal=True,
        window=(30, -1),
        softcap=2.0,
        slopes=torch.rand(2, 6),
    ),
    "grouped": lambda: make((9, 70), (66, 5), (6, 2), is_causal=True),
    "one key head": lambda: make((9, 7), (6, 5), (4, 1)),
    "wide heads": lambda: make((9, 5), (7, 66), sizes=(65, 130)),
    "scale": lambda: make((9, 5), (7, 66), scale=-0.25),
    "dropout": lambda: make((9, 66), (70, 5), (4, 2), dropout=0.4, is_causal=True),
    "everything dropped": lambda: make((9, 6), (7, 5), dropout=1.0),
    "int64 offsets": lambda: make((9, 66), (70, 5), offsets=torch.int64),
    "long maximum": lambda: replace(make((9, 66), (70, 5)), most=(1000, 999)),
    "uncovered": lambda: uncovered(make((5, 9, 0, 66, 300), (270, 7, 3, 5, 1), (2, 1), (4, 8))),
    "uncovered alone": lambda: uncovered(make((5, 9), (7, 3))),
    "short maximum": lambda: replace(make((9, 70), (70, 5), is_causal=True), most=(8, 66)),
    "short maximum, all seen": lambda: replace(make((9, 70), (70, 5), (4, 2)), most=(8, 66)),
    "no maximum": lambda: replace(make((9, 5), (7, 5)), most=(0, 0)),
    "heads outside": lambda: heads_outside(make((9, 66), (70, 5), (4, 2))),
    "spread": lambda: spread(make((9, 66), (70, 5), (4, 2))),
    "no sequence": lambda: make((), ()),
    "no token": lambda: make((0, 0), (0, 0)),
    "no query": lambda: make((0,), (70,)),
    "no key": lambda: make((70,), (0,)),
}


def converted(call: PackedCall, dtype: torch.dtype) -> PackedCall:
    names = ("query", "key", "value", "grad_output")
    return replace(call, **{name: getattr(call, name).to(dtype) for name in names})


OF_THE_OPERATOR = some_of_each_dtype(DTYPES, CALLS)
# These calls the test of the operator compares too, where it runs the kernels on them.
OF_THE_KERNELS = [
    pytest.param(dtype, name, id=f"{name_of(dtype)}-{name}")
    for dtype in DTYPES
    for name in CALLS
    if [dtype, name] not in [list(each.values) for each in OF_THE_OPERATOR]
]


@pytest.mark.parametrize(("dtype", "name"), OF_THE_KERNELS)
def test_results(cuda_emulator: Emulator, name: str, dtype: torch.dtype) -> None:
    check(cuda_emulator, converted(CALLS[name](), dtype))


def test_results_do_not_depend_on_the_grid_or_the_order_of_threads(
    cuda_emulator: Emulator,
) -> None:
    call = make((70, 3, 130), (66, 129, 1), (4, 2), is_causal=True, dropout=0.2)
    results = [check(cuda_emulator, call, blocks) for blocks in (1, 2, 100)]
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


SENSELESS_OFFSETS = [[-5, 3, 9], [0, 400, 2], [7, 0, 3], [0, 2**30, -(2**30)]]


@pytest.mark.parametrize("starts", SENSELESS_OFFSETS)
def test_offsets_that_make_no_sense_touch_nothing_else(
    cuda_emulator: Emulator, starts: list[int]
) -> None:
    """The device reads them when it is too late to refuse: the sanitizer sees every access.

    And every element of the results is written, with whatever.
    """
    call = make((5, 4), (6, 3), is_causal=True)
    wrong = torch.tensor(starts, dtype=torch.int32)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        results = emulated(cuda_emulator, replace(call, **{name: wrong}))
        assert not any((result == 77).any() for result in results)


def operator_results(operators: Operators, call: PackedCall) -> list[Tensor]:
    inputs = (call.query, call.key, call.value, call.cu_seqlens_q, call.cu_seqlens_k)
    seed = SEED if call.dropout > 0 else None
    options = (*call.most, call.dropout, call.scale, call.is_causal)
    forward = operators.scaled_dot_product_attention_varlen_forward
    extras = (call.slopes, *call.window, call.softcap)
    outputs = forward(*inputs, seed, *options, True, *extras)
    backward = operators.scaled_dot_product_attention_varlen_backward
    gradients = backward(call.grad_output, *inputs, seed, *outputs, *options, *extras)
    return [*outputs[:2], *gradients]


@pytest.mark.parametrize(("dtype", "name"), OF_THE_OPERATOR)
def test_the_operator_is_that_of_the_kernels(
    cuda_emulator: Emulator,
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
) -> None:
    """To the last bit: what the host code passes is what is passed here, with right results."""
    monkeypatch.setenv("PKG_CUDA_JOINT_GRADIENTS", "0")
    call = converted(CALLS[name](), dtype)
    actual = operator_results(emulated_operators, call)
    expected = check(cuda_emulator, call)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.2, "slopes": torch.rand(4)}], ids=["plain", "features"]
)
def test_the_operator_makes_all_gradients_by_one_kernel(
    cuda_emulator: Emulator,
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Where there are blocks for many rounds, and unless it is turned off."""
    rows = (9, 70) if dtype == torch.float16 else (9, 170)  # tiles of keys begin together
    call = make(rows, (140, 5), (4, 4), (8, 8), dtype, is_causal=True, **options)
    call.key[..., 0] = 100  # for sums that cancel, and so depend on their order
    actual = operator_results(emulated_operators, call)
    expected = check(cuda_emulator, call, joint=True)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    monkeypatch.setenv("PKG_CUDA_JOINT_GRADIENTS", "0")
    alone = operator_results(emulated_operators, call)
    assert not torch.equal(alone[2], actual[2])  # sums in another order
    assert all(torch.equal(*pair) for pair in zip(alone[3:], actual[3:], strict=True))


def test_the_gradient_of_a_sum_is_copied(emulated_operators: Operators) -> None:
    """One number that was expanded: the same bits as of neighbours."""
    call = make((9, 70), (66, 5))
    number = torch.full((), 0.5).expand(call.grad_output.shape)
    calls = [replace(call, grad_output=each) for each in (number, number.contiguous())]
    results = [operator_results(emulated_operators, each) for each in calls]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_the_cpu_is_within_the_same_bounds(name: str) -> None:
    call = converted(CALLS[name](), torch.float64)
    compare(call, operator_results(getattr(torch.ops, pkg.__name__), call))
