from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import pytest
import references
import torch
import torch.nn.functional as functional
from operator_tests import OperatorTests
from samples import FLOATING, around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample

Shape = tuple[int, ...]

# Query, key, value: every way in which leading dimensions meet, and empty ones.
LEADING: list[tuple[Shape, Shape, Shape]] = [
    ((5, 4), (7, 4), (7, 3)),
    ((2, 5, 4), (2, 7, 4), (2, 7, 4)),
    ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    ((2, 3, 5, 4), (3, 7, 4), (2, 1, 7, 4)),
    ((5, 4), (2, 3, 7, 4), (3, 7, 4)),
]
EMPTY: list[tuple[Shape, Shape, Shape]] = [
    ((2, 0, 4), (2, 3, 4), (2, 3, 4)),
    ((2, 3, 4), (2, 0, 4), (2, 0, 5)),
    ((2, 3, 4), (2, 5, 4), (2, 5, 0)),
    ((0, 3, 4), (1, 5, 4), (1, 5, 4)),
]
MASKS: list[Shape] = [(), (1,), (7,), (5, 1), (1, 7), (5, 7), (3, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7)]
# Around strips of rows, registers and micro-panels of keys, and the blocks of both.
ROWS = around(4, 12, 96, 192)
KEYS = around(8, 16, 32, 192, 384)
SIZES = around(2, 8, 16, 32, 64, 128)


def operands(query: Shape, key: Shape, value: Shape) -> tuple[Tensor, Tensor, Tensor]:
    return normal(*query), normal(*key, seed=1), normal(*value, seed=2)


def boolean_mask(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator) < 0.6


def attention_calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
    """Name, operands and mask, options, and what else of a sample."""
    square = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    grouped = ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6))
    values = {"values_only": True}
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []

    def add(name: str, shapes: Any, mask: Any = None, more: Any = None, **options: Any) -> None:
        calls.append((name, (*operands(*shapes), mask), options, more or {}))

    add("plain", square)
    add("causal", square, is_causal=True)
    add("boolean mask", square, boolean_mask(5, 7))
    add("learnable mask", square, normal(3, 1, 7))
    add("grouped, mask", grouped, normal(5, 7), enable_gqa=True, scale=0.3)
    for size in (3, 8, 21):
        shapes = ((2, size, 4), (2, size + 2, 4), (2, size + 2, 4))
        add("family", shapes, None, {"family": "lengths"})
    for shapes in EMPTY:
        add("empty", shapes, None, {} if shapes is EMPTY[0] else values)
    for shapes in LEADING:
        add("leading", shapes, None, values)
        add("leading, causal", shapes, None, values, is_causal=True)
    for mask in MASKS:
        add("mask", square, boolean_mask(*mask), values)
        add("mask", square, normal(*mask), values)
        add(
            "mask, grouped",
            ((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 6)),
            normal(*mask),
            values,
            enable_gqa=True,
        )
    add("multi-query", ((3, 6, 5, 4), (1, 1, 7, 4), (3, 1, 7, 4)), None, values, enable_gqa=True)
    add("no key in a row", square, torch.arange(5)[:, None] > torch.arange(7) + 1, values)
    add("no key at all", square, torch.zeros(5, 7, dtype=torch.bool), values)
    add("-inf in a mask", square, normal(5, 7).masked_fill(boolean_mask(5, 7), -torch.inf), values)
    add("scale 0", square, None, values, scale=0.0)
    add("scale negative", square, None, values, scale=-2.0)
    for rows in ROWS:
        add("rows", ((rows, 8), (33, 8), (33, 8)), None, values, is_causal=rows % 2 == 0)
    for keys in KEYS:
        add("keys", ((2, 29, 8), (2, keys, 8), (2, keys, 8)), None, values, is_causal=keys % 2 == 1)
        add("few rows", ((3, 8), (keys, 8), (keys, 8)), boolean_mask(3, keys), values)
    for size in SIZES:
        add("head", ((17, size), (35, size), (35, size + 1)), None, values)
    add("long", ((2, 1, 16), (2, 2500, 16), (2, 2500, 16)), None, values)
    add("no head size", ((3, 0), (5, 0), (5, 2)), None, values)
    for heads in ((0, 2), (0, 0)):
        shapes = ((2, heads[0], 5, 4), (2, heads[1], 7, 4), (2, heads[1], 7, 6))
        add("no query heads", shapes, None, values, enable_gqa=True)
    add("large head", ((20, 512), (40, 512), (40, 300)), None, values)
    return calls


def flash_attention_calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
    """As ``attention_calls``, with what flash-attn has beyond PyTorch's attention."""
    square = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    grouped = ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6))
    values = {"values_only": True}
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []

    def add(name: str, shapes: Any, mask: Any = None, more: Any = None, **options: Any) -> None:
        calls.append((name, (*operands(*shapes), mask), options, more or {}))

    add("window", square, window_left=2, window_right=1)
    add("window, causal, learnable mask", square, normal(5, 7), window_left=3, window_right=0)
    most = 2**63 - 1
    more_queries = ((7, 4), (5, 4), (5, 4))
    add("window of all", more_queries, window_left=most, window_right=most)
    add("window, grouped", grouped, enable_gqa=True, window_left=1, window_right=0, scale=0.3)
    for left, right in ((-1, 0), (0, 0), (1, -1), (4, 2), (0, 2), (most, most)):
        window = {"window_left": left, "window_right": right}
        add("window", square, None, values, **window)
        add("window, more queries", more_queries, None, values, **window)
        add("window, causal", square, None, values, is_causal=True, **window)
        add("window, mask", square, boolean_mask(5, 7), values, **window)
        add("window, mask of heads", square, normal(3, 1, 7), values, **window)
    for shapes in EMPTY:
        add("window, empty", shapes, None, values, window_left=1, window_right=0)
    for rows, keys in ((200, 200), (33, 500), (500, 33), (193, 385)):
        shapes = ((2, rows, 8), (2, keys, 8), (2, keys, 9))
        for left, right in ((0, 0), (190, 5), (-1, 3), (40, -1)):
            add("window of blocks", shapes, None, values, window_left=left, window_right=right)
    add(
        "window of blocks, mask",
        *(((2, 200, 8), (2, 400, 8), (2, 400, 8)), boolean_mask(200, 400), values),
        window_left=60,
        window_right=10,
    )
    for rows, left in itertools.product((1, 3, 8), (0, 5, 200, 600)):
        shapes = ((2, rows, 8), (2, 700, 8), (2, 700, 8))
        add("window, few rows", shapes, None, values, window_left=left, window_right=0)
    # Powers of two, as ALiBi has them, which autocast's dtypes hold exactly.
    slopes = torch.tensor([0.5, 0.25, 0.125])
    add("softcap", square, softcap=1.5)
    add("softcap, learnable mask", square, normal(5, 7), softcap=0.7)
    add("alibi", square, alibi_slopes=slopes)
    add(
        "all of flash-attn's, grouped",
        grouped,
        enable_gqa=True,
        window_left=2,
        window_right=1,
        softcap=2.0,
        alibi_slopes=0.5 ** torch.arange(8.0).view(2, 4),
    )
    for shape in ((), (1,), (2, 1), (1, 3), (2, 3)):
        add("alibi", square, None, values, alibi_slopes=normal(*shape, seed=7))
    add("alibi, one matrix", square_of_one(), None, values, alibi_slopes=torch.tensor(0.25))
    add("alibi, a strided mask", square, boolean_mask(7, 5).mT, values, alibi_slopes=slopes)
    for cap in (1e-3, 0.2, 50.0, 1e6):
        add("softcap", square, None, values, softcap=cap)
        add("softcap, negative scale", square, None, values, softcap=cap, scale=-2.0)
    add("softcap, large head", ((20, 512), (40, 512), (40, 300)), None, values, softcap=1.0)
    for rows, keys in ((1, 700), (8, 700), (200, 400), (97, 193), (13, 7)):
        shapes = ((2, 2, rows, 8), (2, 2, keys, 8), (2, 2, keys, 9))
        slopes = normal(2, seed=7) / 20
        add("softcap of blocks", shapes, None, values, softcap=1.0, is_causal=rows % 2 == 0)
        add("alibi of blocks", shapes, boolean_mask(rows, keys), values, alibi_slopes=slopes)
        add(
            "all of blocks",
            *(shapes, normal(rows, keys), values),
            alibi_slopes=slopes,
            softcap=3.0,
            window_left=100,
            window_right=20,
        )
    return calls


def square_of_one() -> tuple[Shape, Shape, Shape]:
    return (5, 4), (7, 4), (7, 3)


def special_calls() -> list[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    calls = []
    for value in (torch.nan, torch.inf, -torch.inf):
        for position, name in enumerate(("query", "key", "value")):
            tensors = operands((2, 30, 8), (2, 40, 8), (2, 40, 8))
            tensors[position][1, 7, 3] = value
            calls.append((f"{value} in {name}", tensors))
    large = operands((2, 30, 8), (2, 40, 8), (2, 40, 8))
    calls.append(("huge scores", (large[0] * 100, large[1] * 100, large[2])))
    return calls


def kept_of(
    seed: Tensor | None, dropout_p: float, query: Tensor, key: Tensor, value: Tensor
) -> Tensor | None:
    if seed is None:
        return None
    key_lead, value_lead = key.shape[:-2], value.shape[:-2]
    if query.dim() > 2 and key.dim() > 2:
        key_lead, value_lead = (
            (*lead[:-1], max(lead[-1], query.shape[-3])) for lead in (key_lead, value_lead)
        )
    lead = torch.broadcast_shapes(query.shape[:-2], key_lead, value_lead)
    rows, columns = query.shape[-2], key.shape[-2]
    kept = torch.ops.pkg.attention_dropout_mask(seed, prod(lead), rows, columns, dropout_p)
    return kept.reshape(*lead, rows, columns)


def forward_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    _keeps_residual: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (is_causal, scale, enable_gqa, window_left, window_right, softcap, alibi_slopes)
    kept = kept_of(dropout_seed, dropout_p, query, key, value)
    output = references.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, *options, kept=kept
    )
    log_sum_exp = references.attention_log_sum_exp(query, key, attn_mask, *options)
    log_sum_exp = log_sum_exp.expand(output.shape[:-1])
    log_sum_exp = log_sum_exp.to(torch.promote_types(query.dtype, torch.float32))
    return output, log_sum_exp, query.new_empty(0)


def backward_reference(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needs_mask_grad: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = kept_of(dropout_seed, dropout_p, query, key, value)

    def forward(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        return references.scaled_dot_product_attention(
            *(query, key, value, mask[0] if mask else attn_mask, dropout_p),
            *(is_causal, scale, enable_gqa, window_left, window_right, softcap, alibi_slopes),
            kept=kept,
        )

    masks = (attn_mask,) if needs_mask_grad and attn_mask is not None else ()
    gradients = torch.func.vjp(forward, query, key, value, *masks)[1](grad_output)
    return (*gradients, query.new_empty(0))[:4]


def forward_outputs(
    inputs: Sequence[Any], options: Sequence[Any], extras: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward operator is given of the forward pass, on the inputs' device."""
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_forward
    outputs: tuple[Tensor, Tensor, Tensor] = forward(*inputs, *options, True, *extras)
    return outputs


def backward_from_inputs(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    *options: Any,
) -> Any:
    """The operator after its forward pass: a function of the inputs alone, as in its use.

    Results of the forward pass that cannot be those of the inputs reach the operator as they are.
    """
    inputs = (query, key, value, attn_mask, dropout_seed)
    outputs = forward_outputs(inputs, options[:4], options[5:])
    given = (output, log_sum_exp, output_residual)
    if any(
        (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
        for a, b in zip(outputs, given, strict=True)
    ):
        outputs = given
    backward = torch.ops.pkg.scaled_dot_product_attention_backward
    return backward(grad_output, *inputs, *outputs, *options)


def with_all_arguments(
    arguments: tuple[Any, ...],
    *,
    seed: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **extras: Any,
) -> tuple[Any, ...]:
    seeds = None if seed is None else torch.tensor([seed])
    given = (*arguments, seeds, dropout_p, is_causal, scale, enable_gqa, False)
    defaults = {"alibi_slopes": None, "window_left": -1, "window_right": -1, "softcap": 0.0}
    return (*given, *(defaults | extras).values()) if extras else given


DROPPED: list[tuple[Shape, Shape, Shape]] = [
    ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    ((2, 4, 35, 8), (2, 2, 200, 8), (1, 2, 200, 9)),
]


class TestAttention(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention.default
    reference = staticmethod(references.scaled_dot_product_attention)
    function = staticmethod(pkg.ops.scaled_dot_product_attention)
    options = MappingProxyType({"autocast": "lower", "nondifferentiable_inputs": {"alibi_slopes"}})

    def samples(self) -> list[Sample]:
        samples = [
            Sample(arguments, options, name=name, **more)
            for name, arguments, options, more in attention_calls()
        ]
        samples += [
            # Where one key has all the probability, the gradients are smaller than what rounding
            # leaves of the difference that they come from (arXiv 2307.08691, dP - D).
            Sample(
                tensors,
                name=name,
                values_only=True,
                gradcheck=False,
                differentiable=name != "huge scores",
            )
            for name, tensors in special_calls()
        ]
        half = torch.tensor([[0.5, -1.0, 0.25]], dtype=torch.float32)
        samples.append(
            Sample(
                (*operands((5, 4), (3, 4), (3, 4)), half),
                name="float32 mask",
                dtypes=(torch.float32, torch.bfloat16, torch.float16),
                values_only=True,
            )
        )
        dropout = {"dropout_p": 0.4}
        samples.append(Sample(operands(*DROPPED[0]), dropout, name="dropout", random=True))
        samples += [
            Sample(arguments, options, name=name, **more)
            for name, arguments, options, more in flash_attention_calls()
        ]
        samples += [
            Sample(
                tensors, {"softcap": 2.0}, name=f"{name}, capped", values_only=True, gradcheck=False
            )
            for name, tensors in special_calls()
            if "query" in name
        ]
        return samples

    def errors(self) -> list[ErrorSample]:
        query, key = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
        mask = torch.ones(3, 5, dtype=torch.bool)

        def refused(match: str, *arguments: Any, **options: Any) -> ErrorSample:
            return ErrorSample(arguments, options, match=match)

        return [
            refused("key is torch.float64", query, key.double(), key),
            refused("value is torch.float16", query, key, key.half()),
            refused("query is torch.int64; supported", query.long(), key.long(), key.long()),
            refused("same last dimension", query, key[..., :3], key),
            refused("same length in dimension -2", query, key, key[:, :4]),
            refused("do not broadcast", query, torch.ones(3, 5, 4), torch.ones(3, 5, 4)),
            refused("pass enable_gqa=True", torch.ones(6, 5, 4), *[torch.ones(3, 5, 4)] * 2),
            refused("at least two dimensions", query[0, 0], key, key),
            refused("exclude each other", query, key, key, mask, is_causal=True),
            refused("does not broadcast to the scores", query, key, key, mask.mT),
            refused("attn_mask is torch.int64", query, key, key, mask.long()),
            refused("attn_mask is torch.float64", query, key, key, mask.double()),
            refused("dropout_p is 1.5", query, key, key, dropout_p=1.5),
            refused("dropout_p is -0.5", query, key, key, dropout_p=-0.5),
            refused(
                "not a multiple", query, torch.ones(5, 5, 4), torch.ones(5, 5, 4), enable_gqa=True
            ),
            refused(
                "2 heads, not a multiple of the 0",
                *(query, torch.ones(0, 5, 4), torch.ones(0, 5, 4)),
                enable_gqa=True,
            ),
            refused("needs a dimension of heads", query[0], key[0], key[0], enable_gqa=True),
            refused("window_left is -2", query, key, key, window_left=-2),
            refused("window_right is -7", query, key, key, window_right=-7),
            refused("softcap is -0.5", query, key, key, softcap=-0.5),
            refused("softcap is inf", query, key, key, softcap=torch.inf),
            refused(
                "alibi_slopes is torch.int64", query, key, key, alibi_slopes=torch.ones(2).long()
            ),
            refused(
                "alibi_slopes is torch.float64",
                query,
                key,
                key,
                alibi_slopes=torch.ones(2).double(),
            ),
            refused(
                "does not broadcast to the leading", query, key, key, alibi_slopes=torch.ones(3)
            ),
            refused(
                "does not broadcast to the leading", query, key, key, alibi_slopes=torch.ones(1, 2)
            ),
        ]

    def test_autocast_leaves_slopes_as_they_are(self, device: torch.device) -> None:
        """Their errors are multiplied by distances, and flash-attn takes float32 alone."""
        tensors = [t.float().to(device) for t in operands((3, 5, 4), (3, 300, 4), (3, 300, 4))]
        slopes = torch.tensor([0.1, 0.03, 0.007], device=device)
        attend = pkg.ops.scaled_dot_product_attention
        with torch.autocast(device.type, torch.bfloat16):
            output = attend(*tensors, alibi_slopes=slopes)
        halves = [tensor.bfloat16() for tensor in tensors]
        assert torch.equal(output, attend(*halves, alibi_slopes=slopes))
        assert not torch.equal(output, attend(*halves, alibi_slopes=slopes.bfloat16()))

    def test_slopes_have_no_gradient(self, device: torch.device) -> None:
        tensors = [t.to(device) for t in operands((3, 5, 4), (3, 7, 4), (3, 7, 4))]
        slopes = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="alibi_slopes requires a gradient"):
            pkg.ops.scaled_dot_product_attention(*tensors, alibi_slopes=slopes)
        with torch.no_grad():
            pkg.ops.scaled_dot_product_attention(*tensors, alibi_slopes=slopes)

    def test_a_window_costs_what_it_holds(self) -> None:
        """Keys that no query of a strip sees are left out, forward and backward."""
        tensors = [t.requires_grad_() for t in operands(*[(1, 2048, 64)] * 3)]

        def seconds(**options: Any) -> float:
            def run() -> float:
                start = time.perf_counter()
                pkg.ops.scaled_dot_product_attention(*tensors, **options).sum().backward()
                return time.perf_counter() - start

            return min(run() for _ in range(5))

        # An eighth of the keys and a block at either end, of 192 on the CPU.
        assert seconds(window_left=128, window_right=0) < seconds() / 2

    @pytest.mark.parametrize(
        ("function", "error"),
        [(pkg.ops, TypeError), (pkg._C, TypeError), (torch.ops.pkg, RuntimeError)],
    )
    def test_scale_is_given_by_name(self, function: Any, error: type[Exception]) -> None:
        """As PyTorch's function has it: by position it could be taken for ``is_causal``."""
        attend = function.scaled_dot_product_attention
        inputs = operands((2, 3, 4), (2, 5, 4), (2, 5, 4))
        attend(*inputs, None, 0.0, False, scale=0.125)
        with pytest.raises(error):
            attend(*inputs, None, 0.0, False, 0.125)

    def test_output_has_the_memory_order_of_the_query(self) -> None:
        query, key = normal(2, 9, 3, 4).transpose(1, 2), normal(2, 3, 7, 4)
        value = normal(2, 3, 7, 5)
        output = pkg.ops.scaled_dot_product_attention(query, key, value)
        assert output.transpose(1, 2).is_contiguous()
        meta = (tensor.to("meta") for tensor in (query, key, value))
        assert pkg.ops.scaled_dot_product_attention(*meta).stride() == output.stride()
        query = query.contiguous()
        assert pkg.ops.scaled_dot_product_attention(query, key, value).is_contiguous()

    @pytest.mark.parametrize("layout", ["last dimension first", "every other", "expanded"])
    @pytest.mark.parametrize("dtype", FLOATING)
    def test_strides(self, device: torch.device, dtype: torch.dtype, layout: str) -> None:
        def strided(*shape: int) -> Tensor:
            tensor = normal(*shape).to(device, dtype)
            if layout == "last dimension first":
                return tensor.mT.contiguous().mT
            if layout == "every other":
                return tensor.repeat_interleave(2, -1)[..., ::2]
            return tensor[:1, :1].expand(shape)

        shapes = ((2, 3, 50, 20), (2, 3, 210, 20), (2, 3, 210, 33))
        tensors = [strided(*shape).requires_grad_() for shape in shapes]
        plain = [tensor.detach().contiguous().requires_grad_() for tensor in tensors]
        results = []
        for inputs in (tensors, plain):
            output = pkg.ops.scaled_dot_product_attention(*inputs)
            grad = normal(2, 3, 50, 33, seed=3).to(device, dtype)
            results.append([output, *torch.autograd.grad(output, inputs, grad)])
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_no_key_gives_zeros(self, device: torch.device, dtype: torch.dtype) -> None:
        shapes = ((2, 20, 8), (2, 300, 8), (2, 300, 8))
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in operands(*shapes)]
        mask = torch.ones(20, 300, dtype=torch.bool, device=device)
        mask[::3] = False
        output = pkg.ops.scaled_dot_product_attention(*inputs, mask)
        assert (output[:, ::3] == 0).all()
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert (gradients[0][:, ::3] == 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_threads_agree(self, dtype: torch.dtype) -> None:
        """The same bits from run to run, and nearly the same with another number of threads."""
        mask = boolean_mask(70, 300)
        calls: list[tuple[Any, dict[str, Any]]] = [
            (((1, 1, 400, 16), (1, 1, 900, 16), (1, 1, 900, 16)), {}),
            (((3, 2, 5, 8), (3, 2, 3000, 8), (3, 2, 3000, 8)), {}),
            (((5, 2, 70, 8), (5, 2, 30, 8), (5, 2, 30, 8)), {}),
            (((2, 2, 500, 64), (2, 2, 500, 64), (2, 2, 500, 64)), {"is_causal": True}),
            (((2, 4, 70, 16), (2, 1, 300, 16), (2, 1, 300, 16)), {"enable_gqa": True}),
            (((2, 2, 70, 16), (2, 2, 300, 16), (2, 2, 300, 16)), {"attn_mask": mask}),
            (((2, 2, 70, 16), (2, 2, 300, 16), (2, 2, 300, 16)), {"dropout_p": 0.3}),
        ]
        for shapes, options in calls:
            tensors = [tensor.to(dtype) for tensor in operands(*shapes)]
            learned = normal(2, 70, 300, seed=5).to(dtype) if "attn_mask" in options else None
            for chosen in [options] + [{"attn_mask": learned}] * (learned is not None):
                results = self.results_by_threads(tensors, chosen, (1, 2, 3, 5))
                for first, again in results:
                    assert all(map(torch.equal, first, again))
                for (result, _), (other, _) in itertools.pairwise(results):
                    for one, another in zip(result, other, strict=True):
                        # How exact they are is asked elsewhere; here, whether a part is missing.
                        half_the_digits = torch.finfo(dtype).eps ** 0.5
                        assert (one - another).norm() <= half_the_digits * one.norm()

    def results_by_threads(
        self, tensors: list[Tensor], options: dict[str, Any], counts: Sequence[int]
    ) -> list[tuple[list[Tensor], ...]]:
        """Output and gradients, twice with each number of threads."""
        inputs = [tensor.requires_grad_() for tensor in tensors]
        wanted = list(inputs)
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            wanted.append(mask.requires_grad_())

        def run() -> list[Tensor]:
            torch.manual_seed(0)  # of dropout
            output = pkg.ops.scaled_dot_product_attention(*inputs, **options)
            return [output.detach(), *torch.autograd.grad(output.square().sum(), wanted)]

        threads = torch.get_num_threads()
        results = []
        try:
            for count in counts:
                torch.set_num_threads(count)
                results.append((run(), run()))
        finally:
            torch.set_num_threads(threads)
        return results

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_samples_of_pytorch(self, device: torch.device, dtype: torch.dtype) -> None:
        info = pytorch_samples()
        assert dtype in info.dtypes
        samples = list(info.sample_inputs(device, dtype, requires_grad=True))
        assert samples
        for sample in samples:
            inputs = (sample.input, *sample.args)
            options = dict(sample.kwargs)
            mask = options.pop("attn_mask", None)
            added = mask is not None and mask.dtype != torch.bool
            wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
            wide_mask = mask.detach().double() if added else mask
            theirs = info.op
            if options.get("dropout_p", 0.0) > 0.0:
                theirs = with_the_next_dropout(inputs, options["dropout_p"])
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                plain = with_gradients(theirs, inputs, mask, options)
                exact = with_gradients(theirs, wide, wide_mask, options)
            ours = with_gradients(pkg.ops.scaled_dot_product_attention, inputs, mask, options)
            self.compare_sample(inputs, options, ours, plain, exact)

    def compare_sample(
        self,
        inputs: Sequence[Tensor],
        options: dict[str, Any],
        ours: list[Tensor],
        plain: list[Tensor],
        exact: list[Tensor],
    ) -> None:
        """At most twice the error of the plain results, and the roundings of the probabilities.

        A probability is the exponential of a score, which is rounded relative to its size; of some
        rows by chance one way's roundings are several times those of another.
        Gradients of query and key come from a difference of two sums of values (grad_output is 1),
        times a key or a query. A sum of n products is off by at most n half epsilons of its terms
        (Higham, Accuracy and Stability, section 3.1).
        """
        query, key, value = (tensor.detach().double() for tensor in inputs)
        scale = options.get("scale") or query.shape[-1] ** -0.5
        score = query.abs().sum(-1).max() * key.abs().max() * scale
        terms = value.abs().sum(-1).max() * max(query.abs().max(), key.abs().max()) * scale
        terms = terms * value.shape[-1]
        epsilon = torch.finfo(inputs[0].dtype).eps
        for index, (result, other, expected) in enumerate(zip(ours, plain, exact, strict=True)):
            if result.dtype == torch.float64:  # nothing wider to measure errors in
                torch.testing.assert_close(result, other)
                continue
            size = expected.abs().max()
            bound = 2 * (other - expected).abs().max() + epsilon * size
            bound = bound + epsilon * (terms if index in (1, 2) else score * size)
            assert (result - expected).abs().max() <= bound

    def test_errors_of_pytorch(self, device: torch.device) -> None:
        info = pytorch_samples()
        if info.error_inputs_func is None:
            pytest.skip("this PyTorch lists none")
        for wrong in info.error_inputs(device):
            sample = wrong.sample_input
            with pytest.raises(wrong.error_type):
                pkg.ops.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda q, k, v: (q, k.double(), v),
            lambda q, k, v: (q, k, v.half()),
            lambda q, k, v: (q, k.to("meta"), v),
            lambda q, k, v: (q[0, 0, 0], k, v),
            lambda q, k, v: (q, k[..., :3], v),
            lambda q, k, v: (q, k[:, :, :4], v),
            lambda q, k, v: (q, k[:, :1].expand(2, 5, 7, 4), v),
            lambda q, k, v: (q, k, v, torch.ones(5, 6, dtype=torch.bool, device=q.device)),
            lambda q, k, v: (q, k, v, torch.ones(5, 7, dtype=torch.int64, device=q.device)),
            lambda q, k, v: (q, k, v, torch.ones(5, 7, dtype=torch.bool, device=q.device), 0, True),
            lambda q, k, v: (q, k, v, None, 2.0),
        ],
    )
    def test_what_pytorch_refuses_is_refused(
        self, device: torch.device, spoil: Callable[..., tuple[Any, ...]]
    ) -> None:
        """The cases of PyTorch's test_transformers.py and those of its documentation."""
        shapes = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
        arguments = spoil(*(tensor.float().to(device) for tensor in operands(*shapes)))
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with math, pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(*arguments)
        with pytest.raises(RuntimeError):
            pkg.ops.scaled_dot_product_attention(*arguments)

    def test_memory_is_linear(self) -> None:
        length, heads, size = 8192, 1, 64
        program = f"""
import resource, torch, pkg
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def run(length, dtype, **options):
    shape = (1, {heads}, length, {size})
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    pkg.ops.scaled_dot_product_attention(*tensors, **options).sum().backward()
calls = [(torch.float32, {{}}), (torch.bfloat16, {{"is_causal": True, "dropout_p": 0.1}})]
for dtype, options in calls:
    run(256, dtype, **options)
before = peak()
for dtype, options in calls:
    run({length}, dtype, **options)
    print(peak() - before, torch.get_num_threads())
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        operand = heads * length * size * 4
        for line in done.stdout.splitlines():
            growth, threads = map(int, line.split())
            # Query, key, value, output, its gradient, three gradients; as much again while a
            # gradient is accumulated and for packed copies; a part of two gradients a thread.
            # One matrix of scores would be 256 MiB.
            assert growth < (8 + 8 + 2 * threads) * operand < length**2 * heads * 4


def pytorch_samples() -> Any:
    """What PyTorch's own tests know of its operator."""
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    name = "nn.functional.scaled_dot_product_attention"
    (info,) = (info for info in methods.op_db if info.name == name)
    return info


def with_the_next_dropout(inputs: Sequence[Tensor], dropout_p: float) -> Callable[..., Tensor]:
    """The reference with the probabilities kept that the next call of ours will keep."""
    with torch.random.fork_rng():
        seed = torch.randint(
            torch.iinfo(torch.int64).max, (1,), dtype=torch.int64, device=inputs[0].device
        )
    query, key, value = inputs
    kept = kept_of(seed, dropout_p, query, key, value)

    def reference(*tensors: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        return references.scaled_dot_product_attention(*tensors, attn_mask, **options, kept=kept)

    return reference


def with_gradients(
    function: Callable[..., Tensor], inputs: Any, mask: Tensor | None, options: dict[str, Any]
) -> list[Tensor]:
    output = function(*inputs, attn_mask=mask, **options)
    return [output, *torch.autograd.grad(output, inputs[:3], torch.ones_like(output))]


class TestDropout:
    @pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
    def test_rate(self, device: torch.device, dropout_p: float) -> None:
        kept = torch.ops.pkg.attention_dropout_mask(
            torch.tensor([42], device=device), 8, 300, 301, dropout_p
        )
        count = kept.numel()
        deviation = (count * dropout_p * (1 - dropout_p)) ** 0.5
        assert abs(int((~kept).sum()) - count * dropout_p) < 5 * deviation
        # Neighbours in every dimension are independent: they agree as often as chance has it.
        for dim in range(3):
            first = kept.narrow(dim, 0, kept.shape[dim] - 1)
            second = kept.narrow(dim, 1, kept.shape[dim] - 1)
            both = (~first & ~second).double().mean()
            assert abs(float(both) - dropout_p**2) < 5 / first.numel() ** 0.5

    def test_ends(self, device: torch.device) -> None:
        seed = torch.tensor([1], device=device)
        assert torch.ops.pkg.attention_dropout_mask(seed, 2, 3, 5, 0.0).all()
        assert not torch.ops.pkg.attention_dropout_mask(seed, 2, 3, 5, 1.0).any()
        tensors = [tensor.to(device) for tensor in operands((3, 4), (5, 4), (5, 4))]
        assert (pkg.ops.scaled_dot_product_attention(*tensors, None, 1.0) == 0).all()

    def test_manual_seed_reproduces(self, device: torch.device) -> None:
        tensors = [tensor.to(device) for tensor in operands(*DROPPED[0])]
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(pkg.ops.scaled_dot_product_attention(*tensors, None, 0.5))
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])

    def test_mean_is_that_without_dropout(self, device: torch.device) -> None:
        query, key, value = (t.to(device) for t in operands((4, 4), (9, 4), (9, 4)))
        draws = 4000
        inputs = (query.expand(draws, 4, 4), key, value)
        torch.manual_seed(0)
        dropped = pkg.ops.scaled_dot_product_attention(*inputs, dropout_p=0.3)
        exact = pkg.ops.scaled_dot_product_attention(query, key, value)
        assert ((dropped.mean(0) - exact).abs() < 5 * dropped.std(0) / draws**0.5).all()

    def test_vmap(self) -> None:
        query, key, value = operands((3, 2, 5, 4), (2, 7, 4), (2, 7, 4))

        def attention(query: Tensor) -> Tensor:
            return pkg.ops.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

        same = query[:1].expand(3, 2, 5, 4)
        outputs = torch.vmap(attention, randomness="same")(same)
        assert torch.equal(outputs[0], outputs[1])
        outputs = torch.vmap(attention, randomness="different")(same)
        assert not torch.equal(outputs[0], outputs[1])
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(attention)(same)


class TestAttentionForward(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention_forward.default
    reference = staticmethod(forward_reference)
    options = MappingProxyType(
        {
            "autocast": "lower",
            "nondifferentiable_outputs": {1, 2},
            "nondifferentiable_inputs": {"alibi_slopes"},
        }
    )
    # Values are compared of all samples. These checks TestAttention makes of every one of the same
    # calls, by the same kernel and formula: here a third shows that the part is registered as the
    # whole is, with each dropout and each of flash-attn's arguments among them.
    one_of = MappingProxyType(dict.fromkeys(("gradients", "layouts", "fake", "compile", "vmap"), 3))

    def samples(self) -> list[Sample]:
        samples = []
        for name, arguments, options, more in attention_calls():
            samples.append(Sample(with_all_arguments(arguments, **options), name=name, **more))
        for shapes in DROPPED:
            tensors = (*operands(*shapes), None)
            options: dict[str, Any] = {"enable_gqa": shapes is DROPPED[1]}
            for dropout_p in (0.3, 1.0):
                arguments = with_all_arguments(tensors, seed=7, dropout_p=dropout_p, **options)
                samples.append(Sample(arguments, name="dropout", values_only=shapes is DROPPED[1]))
        for name, arguments, options, more in flash_attention_calls():
            samples.append(Sample(with_all_arguments(arguments, **options), name=name, **more))
        arguments = with_all_arguments(
            (*operands(*DROPPED[1]), None),
            seed=7,
            dropout_p=0.3,
            enable_gqa=True,
            window_left=60,
            window_right=3,
            softcap=2.0,
            alibi_slopes=normal(2, 4, seed=7),
        )
        samples.append(Sample(arguments, name="dropout, flash-attn's", values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        tensors = (torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), None)
        wrong = (torch.ones(2, dtype=torch.int64), torch.ones(1))
        return [
            ErrorSample((*tensors, None, 0.5, False, None, False, False), match="no dropout_seed"),
            *(
                ErrorSample((*tensors, seed, 0.5, False, None, False, False), match="one element")
                for seed in wrong
            ),
        ]


class TestAttentionBackward(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention_backward.default
    reference = staticmethod(backward_reference)
    function = staticmethod(backward_from_inputs)
    # What the forward pass gave in one dtype is not what it gives in another: float64 templates
    # stay float64, and the other dtypes have samples of their own.
    options = MappingProxyType(
        {
            "nondifferentiable_inputs": {
                *("output", "log_sum_exp", "output_residual", "alibi_slopes")
            },
            "dtypes": (torch.float64,),
        }
    )
    # Values are compared of all samples. 5 is no divisor of what repeats among them.
    one_of = MappingProxyType(
        dict.fromkeys(("gradients", "layouts", "vmap", "compile", "fake", "registration"), 5)
    )

    def samples(self) -> list[Sample]:
        samples = []
        calls = [call for call in attention_calls() if "enable_gqa" not in call[2]][:5]
        calls += [call for call in attention_calls() if call[3]]
        for name, arguments, options, more in calls:
            samples.append(self.sample(name, arguments, options, more))
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                converted = tuple(
                    argument.to(dtype)
                    if isinstance(argument, Tensor) and argument.is_floating_point()
                    else argument
                    for argument in arguments
                )
                samples.append(self.sample(name, converted, options, {"values_only": True}))
        for shapes in DROPPED:
            options = {"seed": 7, "dropout_p": 0.3, "enable_gqa": shapes is DROPPED[1]}
            more = {"values_only": shapes is DROPPED[1]}
            samples.append(self.sample("dropout", (*operands(*shapes), None), options, more))
        for name, arguments, options, more in flash_attention_calls():
            if "enable_gqa" in options:
                continue
            samples.append(self.sample(name, arguments, options, more))
            for dtype in (torch.float32, torch.bfloat16, torch.float16) if "blocks" in name else ():
                converted = tuple(
                    argument.to(dtype)
                    if isinstance(argument, Tensor) and argument.is_floating_point()
                    else argument
                    for argument in arguments
                )
                options = dict(options)
                if options.get("alibi_slopes") is not None:
                    options["alibi_slopes"] = options["alibi_slopes"].float()
                samples.append(self.sample(name, converted, options, {"values_only": True}))
        return samples

    def sample(
        self, name: str, arguments: Any, options: dict[str, Any], more: dict[str, Any]
    ) -> Sample:
        inputs = with_all_arguments(arguments, **options)
        extras = inputs[10:]
        outputs = forward_outputs(inputs[:5], inputs[5:9], extras)
        mask = arguments[3]
        needs_mask_grad = mask is not None and mask.is_floating_point()
        grad = normal(*outputs[0].shape, seed=4).to(outputs[0].dtype)
        return Sample(
            (grad, *inputs[:5], *outputs, *inputs[5:9], needs_mask_grad, *extras),
            name=name,
            **more,
        )

    def on_device(self, sample: Sample, device: torch.device) -> Sample:
        moved = super().on_device(sample, device)
        grad, inputs, options = moved.args[0], moved.args[1:6], moved.args[9:]
        outputs = forward_outputs(inputs, options[:4], options[5:])
        return dataclasses.replace(moved, args=(grad, *inputs, *outputs, *options))

    def errors(self) -> list[ErrorSample]:
        query, key = torch.ones(2, 3), torch.ones(4, 3)
        output, log_sum_exp = torch.ones(2, 3), torch.ones(2)
        empty = torch.empty(0)
        inputs = (query, key, key, None, None)

        def refused(match: str, *given: Tensor, needs_mask_grad: bool = False) -> ErrorSample:
            rest = (0.0, False, None, False, needs_mask_grad)
            return ErrorSample((given[0], *inputs, *given[1:], *rest), match=match)

        return [
            refused("grad_output has shape", torch.ones(3, 2), output, log_sum_exp, empty),
            refused("output is torch.float64", output, output.double(), log_sum_exp, empty),
            refused("log_sum_exp has shape", output, output, output, empty),
            refused("output_residual has shape", output, output, log_sum_exp, log_sum_exp),
            refused(
                "output_residual is torch.float64", *[output] * 2, log_sum_exp, output.double()
            ),
            refused(
                "needs_mask_grad is set", *[output] * 2, log_sum_exp, empty, needs_mask_grad=True
            ),
        ]

    def test_strided_results_of_the_forward_pass(self, device: torch.device) -> None:
        shapes = ((2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 4))
        inputs = [t.to(device, torch.bfloat16) for t in operands(*shapes)]
        inputs += [None, None]
        options: tuple[Any, ...] = (0.0, False, None, False)
        forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_forward
        backward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_backward
        outputs = forward(*inputs, *options, True)
        grad = normal(2, 3, 9, 4).to(inputs[0])
        expected = backward(grad, *inputs, *outputs, *options, False)
        strided = [tensor.mT.contiguous().mT for tensor in (grad, *outputs)]
        actual = backward(strided[0], *inputs, *strided[1:], *options, False)
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rows", "keys", "heads_inside"),
    [(3, 30, 64, False), (2, 300, 64, True), (4, 2, 512, True), (1, 20, 512, False)],
)
def test_the_residual_is_what_rounding_takes_off_the_output(
    device: torch.device, dtype: torch.dtype, heads: int, rows: int, keys: int, heads_inside: bool
) -> None:
    """Of means of whole numbers, which float32 holds exactly, and so do the two parts together."""
    query = torch.zeros(2, heads, rows, 8, dtype=dtype, device=device)
    if heads_inside:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = normal(2, heads, keys, 8).to(query)
    limit = 2 / torch.finfo(dtype).eps  # whole numbers up to there have no more digits
    value = (normal(2, heads, keys, 19, seed=1) * limit / 3).round().clamp(-limit, limit).to(query)
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_forward
    arguments = (query, key, value, None, None, 0.0, False, None, False)
    output, _, residual = forward(*arguments, True)
    assert (residual != 0).any()
    assert residual.stride() == output.stride()
    mean = value.double().mean(-2, keepdim=True)
    assert torch.equal(output.double() + residual.double(), mean.expand(output.shape))
    alone = forward(*arguments, False)
    assert torch.equal(alone[0], output)
    assert alone[2].shape == (0,)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_the_residual_is_finite_where_the_output_is_not(
    device: torch.device, special: float
) -> None:
    query, key, value = (
        t.to(device, torch.bfloat16) for t in operands((2, 5, 4), (2, 7, 4), (2, 7, 20))
    )
    value[0, 3, 2] = special
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_forward
    output, _, residual = forward(query, key, value, None, None, 0.0, False, None, False, True)
    assert not output[0, :, 2].isfinite().any()
    assert (residual[0, :, 2] == 0).all()
    assert residual.isfinite().all()


def test_the_residual_is_kept_for_a_gradient_alone(device: torch.device) -> None:
    shapes = ((2, 5, 4), (2, 7, 4), (2, 7, 4))
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_forward
    for dtype in FLOATING:
        query, key, value = (t.to(device, dtype) for t in operands(*shapes))
        call = (query, key, value, None, None, 0.0, False, None, False, False)
        assert forward(*call)[2].shape == (0,)
        query.requires_grad_()
        is_half = dtype in (torch.float16, torch.bfloat16)
        assert forward(*call)[2].shape == ((2, 5, 4) if is_half else (0,))
        with torch.no_grad():
            assert forward(*call)[2].shape == (0,)


@pytest.mark.parametrize("lead", [(0,), (2,)])
def test_gradients_of_many_keys_without_queries(device: torch.device, lead: Shape) -> None:
    query = torch.ones(*lead, 0 if lead == (2,) else 2, 8, device=device, requires_grad=True)
    key = torch.ones(*lead, 1000, 8, device=device, requires_grad=True)
    output = pkg.ops.scaled_dot_product_attention(query, key, key)
    gradients = torch.autograd.grad(output.sum(), (query, key))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape]
    assert (gradients[1] == 0).all()


class TestAttentionDropoutMask(OperatorTests):
    op = torch.ops.pkg.attention_dropout_mask.default
    options = MappingProxyType({"without": {"gradients", "families", "autocast", "empty"}})

    @staticmethod
    def reference(seed: Tensor, batch: int, rows: int, columns: int, dropout_p: float) -> Tensor:
        """Philox4x32-7 as its authors write it, in Python's integers."""
        key = int(seed) % 2**64
        words = []
        for index in range(batch):
            for row in range(rows):
                for quad in range((columns + 3) // 4):
                    counter = [quad, row, index % 2**32, index >> 32]
                    words += philox(counter, [key % 2**32, key >> 32])[: columns - 4 * quad]
        threshold = int(dropout_p * 2**32)
        kept = torch.tensor([word >= threshold for word in words], dtype=torch.bool)
        return kept.reshape(batch, rows, columns).to(seed.device)

    def samples(self) -> list[Sample]:
        sizes = [(2, 3, 9), (1, 1, 1), (0, 3, 4), (2, 0, 4), (2, 3, 0), (3, 4, 8)]
        samples = [
            Sample((torch.tensor([seed]), *size, 0.5))
            for size, seed in zip(sizes, (1, -1, 2, 3, 4, 2**40 + 5), strict=True)
        ]
        return [*samples, Sample((torch.tensor(-(2**63)), 1, 5, 30, 0.1))]

    def errors(self) -> list[ErrorSample]:
        seed = torch.tensor([1])
        return [
            ErrorSample((seed.int(), 1, 2, 3, 0.5), match="seed is torch.int32"),
            ErrorSample((torch.zeros(2, dtype=torch.int64), 1, 2, 3, 0.5), match="one element"),
            ErrorSample((seed, 1, -2, 3, 0.5), match="must not be negative"),
            ErrorSample((seed, 1, 2, 3, 2.0), match="dropout_p is 2"),
        ]


def philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter
