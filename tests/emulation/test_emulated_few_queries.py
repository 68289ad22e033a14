"""Attention of a few queries, which the host code gives to the kernels of decode_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_emulated_attention as attention
import torch
from test_emulated_attention import Call, name_of, some_of_each_dtype
from test_emulated_operators import FLOATS, backward, converted, forward, heads_inside
from torch import Tensor

Operators = torch._ops._OpNamespace
VARIABLE = "PKG_CUDA_FEW_QUERIES"
HALVES = [torch.float16, torch.bfloat16]

make = attention.make


def random_mask(*shape: int) -> Tensor:
    """Of a row of which every key may take part, and one of which none may."""
    mask = torch.rand(shape) > 0.4
    mask[..., :1, :] = True
    mask[..., -1:, :] &= shape[-2] == 1
    return mask


def one_key_head_for_all(call: Call) -> Call:
    """Key and value broadcast among the heads, without groups."""
    return replace(call, key=call.key[:, :1].expand_as(call.key), value=call.value[:, :1])


def with_steps(call: Call) -> Call:
    """Every second element of twice as many, from an address that no packet has."""

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., 1::2]

    return replace(call, query=spread(call.query), key=spread(call.key), value=spread(call.value))


FEW = {
    "one query": lambda: make(2, 3, rows=1, columns=70, head=8),
    "many keys": lambda: make(2, 3, rows=1, columns=1100, head=8, value_head=5),
    "wide heads": lambda: make(2, rows=1, columns=70, head=130, value_head=200),
    "no leading dimension": lambda: make(rows=1, columns=70),
    "one head": lambda: make(3, 1, rows=2, columns=70),
    "one sequence": lambda: make(1, 3, rows=2, columns=70),
    "more leading dimensions": lambda: make(3, 1, 2, rows=2, columns=70),
    "groups": lambda: make(2, 6, key_lead=(2, 2), rows=1, columns=70, enable_gqa=True),
    "groups of several queries": lambda: make(
        2, 6, key_lead=(2, 2), rows=5, columns=300, head=8, enable_gqa=True
    ),
    "a group of more rows than a product": lambda: make(
        2, 40, key_lead=(2, 1), rows=1, columns=70, enable_gqa=True
    ),
    "one key head for all": lambda: one_key_head_for_all(make(2, 6, rows=1, columns=70)),
    "that, several queries": lambda: one_key_head_for_all(make(2, 6, rows=2, columns=70)),
    "that, more rows than a product": lambda: one_key_head_for_all(make(2, 6, rows=3, columns=70)),
    "sixteen queries": lambda: make(2, 3, rows=16, columns=70, head=8),
    "more queries than keys": lambda: make(2, rows=9, columns=4),
    "heads inside": lambda: heads_inside(make(2, 3, rows=3, columns=70, head=8)),
    "steps": lambda: with_steps(make(2, 3, rows=3, columns=70, head=9)),
    "scale": lambda: make(2, rows=3, columns=70, scale=-0.25),
    "bool mask of sequences": lambda: make(
        2, 3, rows=1, columns=300, mask=random_mask(2, 1, 1, 300)
    ),
    "bool mask": lambda: make(2, 3, rows=9, columns=70, mask=random_mask(2, 3, 9, 70)),
    "mask": lambda: make(2, 3, rows=2, columns=70, mask=torch.randn(3, 2, 70)),
    "mask of keys": lambda: make(2, 3, rows=2, columns=70, mask=torch.randn(70)),
    "mask of queries": lambda: make(2, 3, rows=5, columns=70, mask=torch.randn(5, 1)),
    "mask with steps": lambda: make(
        2, 3, rows=5, columns=70, mask=torch.randn(2, 3, 5, 140)[..., ::2]
    ),
    "mask of groups": lambda: make(
        2, 6, key_lead=(2, 2), rows=2, columns=70, enable_gqa=True, mask=torch.randn(6, 2, 70)
    ),
    "softcap": lambda: make(2, 3, rows=2, columns=70, softcap=0.7, mask=torch.randn(2, 70)),
    "window of one": lambda: make(2, 3, rows=1, columns=300, window=(130, 0)),
    "window": lambda: make(2, 3, rows=4, columns=300, window=(20, 0)),
    "lower right": lambda: make(2, 3, rows=4, columns=70, window=(-1, 0)),
    "lower right, fewer keys": lambda: make(2, rows=9, columns=4, window=(-1, 0)),
    "slopes": lambda: make(2, 3, rows=1, columns=70, slopes=torch.rand(3)),
    "slopes of batches": lambda: make(
        2, 3, rows=4, columns=70, window=(-1, 0), slopes=torch.rand(2, 6)[:, ::2]
    ),
    "causal, one key": lambda: make(2, 3, rows=1, columns=1, is_causal=True),
}
OTHERS = {
    "seventeen queries": lambda: make(2, 3, rows=17, columns=70, head=8),
    "too many rows of a group": lambda: make(
        2, 6, key_lead=(2, 2), rows=6, columns=70, enable_gqa=True
    ),
    "causal": lambda: make(2, 3, rows=4, columns=70, is_causal=True),
    "causal, one query": lambda: make(2, 3, rows=1, columns=70, is_causal=True),
    "a window to both sides": lambda: make(2, 3, rows=4, columns=70, window=(20, 1)),
    "a window of queries that see the last key": lambda: make(
        2, 3, rows=4, columns=70, window=(20, -1)
    ),
    "slopes of queries that see the last key": lambda: make(
        2, 3, rows=4, columns=70, slopes=torch.rand(3)
    ),
    "dropout": lambda: make(2, 3, rows=1, columns=70, dropout=0.4),
    "three leading dimensions": lambda: make(2, 2, 3, rows=1, columns=70),
    "no keys": lambda: make(2, 3, rows=1, columns=0),
    "heads of no elements": lambda: make(2, 3, rows=1, columns=70, head=0, value_head=4),
}


def assert_exact(outputs: attention.Outputs, call: Call) -> None:
    """Output and log-sum-exp within the bounds of attention's kernels; the residual is the rest."""
    exact = attention.exact_results(call)
    bounds = attention.bounds_of(call, exact)
    results = [
        output.reshape(value.shape) for output, value in zip(outputs[:2], exact, strict=False)
    ]
    attention.assert_near(attention.RESULTS[:2], results, exact[:2], bounds[:2])
    if call.query.dtype in HALVES:
        whole = outputs[0].double() + outputs[2].double()
        rounding = torch.finfo(call.query.dtype).eps / 2
        assert (outputs[2].double().abs() <= rounding * whole.abs()).all()
        assert outputs[2].any()


@pytest.mark.parametrize(("dtype", "name"), some_of_each_dtype(FLOATS, FEW))
def test_a_few_queries(
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    launched_kernel_type: Callable[[], bytes],
    name: str,
    dtype: torch.dtype,
) -> None:
    call = converted(FEW[name](), dtype)
    outputs = forward(emulated_operators, call)
    assert b"DecodeAttention" in launched_kernel_type()
    assert_exact(outputs, call)
    monkeypatch.setenv(VARIABLE, "0")
    others = forward(emulated_operators, call)
    assert b"AttentionForward" in launched_kernel_type()
    assert [each.stride() for each in outputs] == [each.stride() for each in others]


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_to_the_kernels_of_the_forward_pass(
    emulated_operators: Operators, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    call = converted(OTHERS[name](), torch.bfloat16)
    outputs = forward(emulated_operators, call)
    monkeypatch.setenv(VARIABLE, "0")
    for output, each in zip(outputs, forward(emulated_operators, call), strict=True):
        assert torch.equal(output, each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_comes_out_as_nan(
    emulated_operators: Operators, where: str, dtype: torch.dtype
) -> None:
    call = make(2, 1, rows=3, columns=300, head=8, dtype=dtype)
    getattr(call, where)[0, 0, 2, 7] = torch.nan
    output = forward(emulated_operators, call)[0]
    rows = slice(2, 3) if where == "query" else slice(None)
    columns = slice(7, 8) if where == "value" else slice(None)
    assert output[0, 0, rows, columns].isnan().all()
    assert output.isnan().sum() == output[0, 0, rows, columns].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_keys_that_are_masked_out_may_hold_nan(
    emulated_operators: Operators, dtype: torch.dtype
) -> None:
    call = make(2, 3, rows=2, columns=300, dtype=dtype)
    mask = torch.ones(300, dtype=torch.bool)
    mask[290:] = False
    masked = replace(call, mask=mask)
    expected = forward(emulated_operators, masked)[0]
    call.key[..., 290:, :] = torch.nan
    assert torch.equal(forward(emulated_operators, masked)[0], expected)


def of_one_key(dtype: torch.dtype, *lead: int, rows: int, columns: int, **options: Any) -> Call:
    """Each query sees its own key alone."""
    call = make(*lead, rows=rows, columns=columns, window=(0, 0), **options)
    return converted(call, dtype)


ONE_KEY = {
    "several queries": lambda dtype: of_one_key(dtype, 2, 3, rows=5, columns=70, head=130),
    "one query of many keys": lambda dtype: of_one_key(
        dtype, 2, 3, rows=1, columns=1100, head=33, value_head=130
    ),
    "groups": lambda dtype: of_one_key(
        dtype, 2, 6, key_lead=(2, 2), rows=3, columns=300, head=40, enable_gqa=True
    ),
    "softcap, mask, slopes": lambda dtype: of_one_key(
        *(dtype, 2, 3),
        rows=4,
        columns=70,
        head=20,
        softcap=2.0,
        mask=torch.randn(4, 70),
        slopes=torch.rand(3),
    ),
    "one key for all": lambda dtype: converted(make(2, 3, rows=3, columns=1, head=60), dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("name", ONE_KEY)
def test_one_key_has_all_of_the_weight(
    emulated_operators: Operators, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Its score is the log-sum-exp, to the bit, as the backward pass computes it.

    Of whose weights, exponentials of differences of the two, the gradient of the values is made.
    """
    call = ONE_KEY[name](dtype)
    outputs = forward(emulated_operators, call)
    grad_output = torch.randint(-8, 9, outputs[0].shape).to(dtype) / 8  # whose sums are exact
    grad_value = backward(emulated_operators, replace(call, grad_output=grad_output), outputs)[2]
    expected = torch.zeros_like(grad_value)
    of_heads = grad_output.unflatten(1, (grad_value.shape[1], -1)).sum(2)
    if call.columns == 1:
        expected[...] = of_heads.sum(-2, keepdim=True)
    else:
        expected[..., -call.rows :, :] = of_heads
    torch.testing.assert_close(grad_value, expected, rtol=0, atol=0)
    monkeypatch.setenv(VARIABLE, "0")
    assert torch.equal(outputs[1], forward(emulated_operators, call)[1])
