from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample, same_bits

Lengths = tuple[int, ...]
STRUCTURE = {"cu_seqlens_q", "cu_seqlens_k"}

# Queries and keys of each sequence: empty ones, ones of one token, more queries than keys, as many,
# and lengths around strips of rows, registers and micro-panels of keys, and the blocks of both.
BATCHES: list[tuple[Lengths, Lengths]] = [
    ((1, 1, 1), (1, 2, 300)),
    ((0, 3, 0, 2, 0), (4, 3, 0, 5, 1)),
    ((5, 9), (0, 2)),
    ((3, 65, 12), (130, 7, 12)),
    (tuple(around(4, 12, 96)), tuple(around(8, 16, 192))),
    ((193, 2, 31), (193, 500, 33)),
    ((1, 4, 8), (2500, 400, 1000)),
]
EMPTY: list[tuple[Lengths, Lengths]] = [((), ()), ((0, 0), (0, 0)), ((0,), (3,)), ((3,), (0,))]


def offsets(lengths: Lengths, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def packed(
    rows: Lengths,
    columns: Lengths,
    heads: tuple[int, int] = (2, 2),
    sizes: tuple[int, int] = (4, 4),
    most: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
    """The arguments that say what is attended to."""
    return (
        normal(sum(rows), heads[0], sizes[0]),
        normal(sum(columns), heads[1], sizes[0], seed=1),
        normal(sum(columns), heads[1], sizes[1], seed=2),
        offsets(rows),
        offsets(columns, torch.int64),
        *(most or (max(rows, default=0), max(columns, default=0))),
    )


def padded(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same batch without its first and its last sequence, whose tokens stay."""
    query, key, value, starts, ends, *most = arguments
    return (query, key, value, starts[1:-1], ends[1:-1], *most)


def attention_calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
    """Name, operands, options, and what else of a sample."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []

    def add(name: str, arguments: Any, more: Any = None, **options: Any) -> None:
        calls.append((name, arguments, options, more or {}))

    values = {"values_only": True}
    add("plain", packed((3, 1, 4), (2, 5, 3)))
    add(
        "causal, grouped",
        packed((3, 1, 4), (2, 5, 3), (4, 2), (4, 3)),
        softmax_scale=0.3,
        causal=True,
    )
    for rows, columns in (((5, 8), (6, 11)), ((9, 3, 7, 0), (5, 5, 9, 4)), ((14, 6), (3, 4))):
        arguments = packed(rows, columns, (2, 2), (8, 8), most=(20, 21))
        add("family", arguments, {"family": "lengths"})
    for index, (rows, columns) in enumerate(EMPTY):
        add("empty", packed(rows, columns), values if index else {})
    add("empty values", packed((2, 3), (4, 1), (2, 1), (4, 0)), values)
    add("empty heads", packed((2, 3), (4, 1), (2, 1), (0, 4)), values)
    several = packed((2, 3, 0, 4, 3), (1, 2, 5, 3, 4), (4, 2), (4, 3))
    add("uncovered", padded(several), causal=True)
    add("uncovered alone", padded(packed((2, 3), (1, 4))), values)
    add("uncovered keys", (*several[:3], several[3][2:5], several[4][:3], 4, 5), values)
    add("uncovered strips", padded(packed((70, 65, 9), (3, 130, 66), (2, 1), (8, 9))), values)
    for heads in ((0, 2), (0, 0)):
        add("no query heads", packed((2, 3), (4, 1), heads), values)
    for rows, columns in BATCHES:
        add("batch", packed(rows, columns, (2, 1), (8, 9)), values)
        add("batch, causal", packed(rows, columns, (4, 2), (8, 8)), values, causal=True)
    for size in around(2, 16, 64, 128):
        add("head", packed((5, 13), (35, 8), (2, 2), (size, size + 1)), values, causal=True)
    add("one key", packed((1,), (1,), (4, 2), (8, 8)), values, causal=True)
    add("long maximum", packed((5, 13), (35, 8), most=(1000, 999)), values)
    add("scale negative", packed((5, 13), (35, 8)), values, softmax_scale=-2.0)
    # Of the sequences beyond the maximum the first tokens are computed, and alone aligned.
    for causal in (False, True):
        short = packed((3, 6, 4), (2, 5, 9), (4, 2), (4, 3), most=(4, 3))
        add("short maximum", short, causal=causal)
        few = packed((70, 9, 140), (66, 135, 3), (2, 1), (8, 9), most=(67, 66))
        add("short maximum", few, values, causal=causal)
        add("short maximum of queries", packed((3, 6), (2, 5), most=(4, 5)), values, causal=causal)
        add("short maximum of keys", packed((3, 6), (2, 5), most=(6, 4)), values, causal=causal)
        add("no maximum", packed((3, 6), (2, 5), most=(0, 0)), values, causal=causal)
        add("uncovered, short maximum", padded(packed((2, 3, 5, 1), (4, 6, 2, 3), most=(2, 4))))
    return calls


def flash_attention_calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
    """As ``attention_calls``, with what flash-attn has beyond its first ten arguments."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []

    def add(name: str, arguments: Any, more: Any = None, **options: Any) -> None:
        calls.append((name, arguments, options, more or {}))

    values = {"values_only": True}
    few = packed((3, 1, 4), (2, 5, 3))
    # Powers of two, which autocast's dtypes hold exactly.
    slopes = 0.5 ** torch.arange(2.0)
    add("window", few, window_left=1, window_right=1)
    add("softcap", few, softcap=1.5, causal=True)
    add("slopes", few, alibi_slopes=slopes)
    add(
        "all, grouped",
        packed((3, 1, 4), (2, 5, 3), (4, 2), (4, 3)),
        window_left=2,
        softcap=2.0,
        causal=True,
        alibi_slopes=0.5 ** torch.arange(12.0).view(3, 4),
    )
    most = 2**63 - 1
    windows = ((0, 0, False), (3, -1, True), (-1, 2, False), (2, 5, True), (most, most, False))
    for left, right, causal in windows:
        add(
            "window",
            packed((5, 9, 0, 2), (7, 4, 3, 2)),
            values,
            window_left=left,
            window_right=right,
            causal=causal,
        )
    for rows, columns in EMPTY:
        options = {"window_left": 1, "softcap": 1.0, "alibi_slopes": slopes}
        add("empty", packed(rows, columns), values, **options)
    for rows, columns in BATCHES:
        arguments = packed(rows, columns, (2, 1), (8, 9))
        add("window of blocks", arguments, values, window_left=70, causal=True)
        of_each = normal(len(rows), 4, seed=7)[:, ::2] / 20
        add(
            "all of blocks",
            *(arguments, values),
            window_left=150,
            window_right=3,
            softcap=3.0,
            alibi_slopes=of_each,
        )
    return calls


def kept_of(seed: Tensor | None, dropout_p: float, *arguments: Any) -> Tensor | None:
    query, _, _, cu_seqlens, _, max_seqlen_q, max_seqlen_k = arguments
    if seed is None:
        return None
    batch = (len(cu_seqlens) - 1, query.shape[1])
    kept = torch.ops.pkg.attention_dropout_mask(
        seed, batch[0] * batch[1], max_seqlen_q, max_seqlen_k, dropout_p
    )
    return kept.view(*batch, max_seqlen_q, max_seqlen_k)


def forward_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    _keeps_residual: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    sides = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    output = references.scaled_dot_product_attention_varlen(
        *(*sides, dropout_p, softmax_scale, causal),
        kept=kept_of(dropout_seed, dropout_p, *sides),
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    log_sum_exp = references.packed_log_sum_exp(
        *(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window_left, window_right, softcap, alibi_slopes),
    )
    log_sum_exp = log_sum_exp.to(torch.promote_types(query.dtype, torch.float32))
    return output, log_sum_exp, query.new_empty(0)


def backward_reference(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = (query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_seed)
        return forward_reference(*inputs, *options[:5], False, *options[5:])[0]

    gradients: tuple[Tensor, ...] = torch.func.vjp(forward, query, key, value)[1](grad_output)
    return gradients


def forward_outputs(
    inputs: Sequence[Any], options: Sequence[Any], extras: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward operator is given of the forward pass, on the inputs' device."""
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_varlen_forward
    outputs: tuple[Tensor, Tensor, Tensor] = forward(*inputs, *options, True, *extras)
    return outputs


def backward_from_inputs(*arguments: Any) -> Any:
    """The operator after its forward pass: a function of the inputs alone, as in its use.

    Results of the forward pass that cannot be those of the inputs reach the operator as they are.
    """
    grad_output, *inputs = arguments[:7]
    outputs = forward_outputs(inputs, arguments[10:15], arguments[15:])
    if any(
        (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
        for a, b in zip(outputs, arguments[7:10], strict=True)
    ):
        outputs = arguments[7:10]
    backward = torch.ops.pkg.scaled_dot_product_attention_varlen_backward
    return backward(grad_output, *inputs, *outputs, *arguments[10:])


def with_all_arguments(
    arguments: tuple[Any, ...],
    *,
    seed: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **extras: Any,
) -> tuple[Any, ...]:
    seeds = None if seed is None else torch.tensor([seed])
    given = (*arguments[:5], seeds, *arguments[5:], dropout_p, softmax_scale, causal, False)
    defaults = {"alibi_slopes": None, "window_left": -1, "window_right": -1, "softcap": 0.0}
    return (*given, *(defaults | extras).values()) if extras else given


class TestAttentionVarlen(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention_varlen.default
    reference = staticmethod(references.scaled_dot_product_attention_varlen)
    function = staticmethod(pkg.ops.scaled_dot_product_attention_varlen)
    options = MappingProxyType(
        {
            "autocast": "lower",
            "structural_inputs": STRUCTURE,
            "nondifferentiable_inputs": {"alibi_slopes"},
        }
    )

    def samples(self) -> list[Sample]:
        samples = [
            Sample(arguments, options, name=name, **more)
            for name, arguments, options, more in attention_calls()
        ]
        dropout = {"dropout_p": 0.4, "causal": True}
        arguments = packed((3, 1, 4), (2, 5, 3))
        samples.append(Sample(arguments, dropout, name="dropout", random=True))
        samples += [
            Sample(arguments, options, name=name, **more)
            for name, arguments, options, more in flash_attention_calls()
        ]
        return samples

    def errors(self) -> list[ErrorSample]:
        query, key, value, starts, ends, *most = packed((3, 1), (2, 5), (4, 2))

        def refused(
            match: str, *operands: Any, starts: Tensor = starts, ends: Tensor = ends, **options: Any
        ) -> ErrorSample:
            return ErrorSample((*operands, starts, ends, *most), options, match=match)

        three = query[:, :3].contiguous()
        return [
            refused("key is torch.float64", query.float(), key, value.float()),
            refused("value is torch.float16", query, key, value.half()),
            refused("query is torch.int64; supported", query.long(), key.long(), value.long()),
            refused("query has shape .* three dimensions", query[0], key, value),
            refused("value has shape .* three dimensions", query, key, value[None]),
            refused("same last dimension", query, key[..., :3], value),
            refused("same tokens and heads", query, key, value[:-1]),
            refused("same tokens and heads", query, key, value[:, :1]),
            refused("query has 3 heads, not a multiple of the 2", three, key, value),
            refused("not a multiple of the 0", query, key[:, :0], value[:, :0]),
            refused("cu_seqlens_q is torch.float32", query, key, value, starts=starts.float()),
            refused("cu_seqlens_k is torch.int16", query, key, value, ends=ends.short()),
            refused(
                "cu_seqlens_q has shape .* one dimension", query, key, value, starts=ends[None]
            ),
            refused("one more element than", query, key, value, starts=starts[:0]),
            refused("3 elements but cu_seqlens_k has 2", query, key, value, ends=ends[::2]),
            refused("dropout_p is 1.5", query, key, value, dropout_p=1.5),
            refused("window_left is -3", query, key, value, window_left=-3),
            refused("softcap is -1", query, key, value, softcap=-1.0),
            refused(
                "alibi_slopes has shape .* one for each",
                *(query, key, value),
                alibi_slopes=torch.ones(3),
            ),
            ErrorSample(
                (query, key, value, starts, ends, -1, 5), match="max_seqlen_q -1 .* negative"
            ),
        ]

    @pytest.mark.parametrize("function", [pkg.ops, pkg._C, torch.ops.pkg])
    def test_arguments_are_in_the_order_of_flash_attn(self, function: Any) -> None:
        """``flash_attn_varlen_func(q, k, v, cu, cu, m, m, dropout_p, softmax_scale, causal)``."""
        attend = function.scaled_dot_product_attention_varlen
        arguments = packed((3, 1, 4), (2, 5, 3))
        for scale, causal in ((0.125, True), (0.125, False), (2.0, True)):
            expected = references.scaled_dot_product_attention_varlen(
                *arguments, softmax_scale=scale, causal=causal
            )
            torch.testing.assert_close(attend(*arguments, 0.0, scale, causal), expected)
            by_name = attend(*arguments, dropout_p=0.0, softmax_scale=scale, causal=causal)
            torch.testing.assert_close(by_name, expected)
        assert (attend(*arguments, 1.0, 0.125, True) == 0).all()

    @pytest.mark.parametrize("function", [pkg.ops, pkg._C, torch.ops.pkg])
    def test_sequences_that_do_not_fit_are_refused(self, function: Any) -> None:
        """On the CPU, where the offsets can be read."""
        attend = function.scaled_dot_product_attention_varlen
        tokens, good = torch.ones(6, 1, 2), torch.tensor([0, 2, 6])
        assert attend(tokens, tokens, tokens, good, good, 4, 4).shape == tokens.shape
        wrong = {
            "cu_seqlens_q begins with -1": [-1, 2, 6],
            "cu_seqlens_q decreases from 7 to 6 at element 2": [0, 7, 6],
            "cu_seqlens_q ends with 7 but query has 6 tokens": [0, 3, 7],
        }
        for message, given in wrong.items():
            starts = torch.tensor(given)
            with pytest.raises(RuntimeError, match=message):
                attend(tokens, tokens, tokens, starts, good, 4, 4)
            other = message.replace("_q", "_k").replace("query", "key")
            with pytest.raises(RuntimeError, match=other):
                attend(tokens, tokens, tokens, good, starts, 4, 4)

    def test_a_plain_call_does_not_pass_the_dispatcher(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = packed((3, 1, 4), (2, 5, 3))
        expected = type(self).op(*inputs)
        monkeypatch.setattr(torch._ops.OpOverload, "__call__", None)
        assert same_bits(pkg.ops.scaled_dot_product_attention_varlen(*inputs), expected)
        recorded = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
        output = pkg.ops.scaled_dot_product_attention_varlen(*recorded, *inputs[3:])
        assert same_bits(output.detach(), expected)
        gradients = torch.autograd.grad(output.sum(), recorded)
        assert all(gradient.isfinite().all() for gradient in gradients)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_one_sequence_is_plain_attention(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        arguments = [
            argument.to(device) if isinstance(argument, Tensor) else argument
            for argument in packed((150,), (150,), (4, 2), (24, 40))
        ]
        inputs = [tensor.to(dtype).requires_grad_() for tensor in arguments[:3]]
        grad = normal(150, 4, 40).to(device, dtype)
        for causal in (False, True):
            output = pkg.ops.scaled_dot_product_attention_varlen(
                *inputs, *arguments[3:], causal=causal
            )
            plain = pkg.ops.scaled_dot_product_attention(
                *(tensor.transpose(0, 1) for tensor in inputs), is_causal=causal, enable_gqa=True
            ).transpose(0, 1)
            results = [output, *torch.autograd.grad(output, inputs, grad)]
            for ours, expected in zip(
                results, [plain, *torch.autograd.grad(plain, inputs, grad)], strict=True
            ):
                tolerances = {}
                if device.type == "cuda" and dtype.itemsize == 2:
                    # By other kernels, whose sums are rounded in proportion to their terms.
                    unit = torch.finfo(dtype).eps
                    tolerances = {"rtol": 2 * unit, "atol": unit * float(expected.abs().max())}
                torch.testing.assert_close(ours, expected, **tolerances)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_sequences_do_not_see_one_another(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        rows, columns = (40, 3, 0, 77), (35, 200, 2, 77)
        arguments = packed(rows, columns, (2, 1), (16, 16))
        starts, ends, *most = arguments[3:]
        inputs = [tensor.to(device, dtype) for tensor in arguments[:3]]
        spoilt = [tensor.clone() for tensor in inputs]
        spoilt[0][40:43], spoilt[1][35:235], spoilt[2][35:235] = torch.nan, torch.nan, torch.nan
        results = []
        for operands in (inputs, spoilt):
            leaves = [tensor.requires_grad_() for tensor in operands]
            output = pkg.ops.scaled_dot_product_attention_varlen(
                *leaves, starts.to(device), ends.to(device), *most, causal=True
            )
            grad = torch.ones_like(output)
            results.append([output, *torch.autograd.grad(output, leaves, grad)])
        spans = [slice(40, 43), slice(40, 43), slice(35, 235), slice(35, 235)]
        for span, clean, other in zip(spans, *results, strict=True):
            kept = torch.ones(len(clean), dtype=torch.bool, device=device)
            kept[span] = False
            assert other[span].isnan().all()
            assert torch.equal(other[kept], clean[kept])

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_rows_without_a_key_give_zeros(self, device: torch.device, dtype: torch.dtype) -> None:
        starts, ends = (offsets(each).to(device) for each in ((70, 5, 9), (20, 0, 9)))
        leaves = [
            tensor.to(device, dtype).requires_grad_()
            for tensor in packed((70, 5, 9), (20, 0, 9), (2, 1), (8, 8))[:3]
        ]
        output = pkg.ops.scaled_dot_product_attention_varlen(
            *leaves, starts, ends, 70, 20, causal=True
        )
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        for result in (output, gradients[0]):
            assert (result[:50] == 0).all()
            assert (result[70:75] == 0).all()
        assert output[50:70].ne(0).any(-1).all()
        assert all(gradient.isfinite().all() for gradient in gradients)

    @pytest.mark.parametrize("dtype", FLOATING)
    @pytest.mark.parametrize(
        ("rows", "columns", "heads"),
        [
            ((900,), (900,), (1, 1)),
            ((700, 30, 5), (700, 30, 5), (2, 1)),
            (tuple(range(1, 40)), tuple(range(39, 0, -1)), (4, 2)),
            ((64,) * 5, (64,) * 5, (1, 1)),
        ],
    )
    def test_threads_agree(
        self, dtype: torch.dtype, rows: Lengths, columns: Lengths, heads: tuple[int, int]
    ) -> None:
        *operands, starts, ends, longest_q, longest_k = packed(rows, columns, heads, (16, 16))
        leaves = [tensor.to(dtype).requires_grad_() for tensor in operands]
        threads = torch.get_num_threads()
        results = []
        try:
            for count in (1, 2, 2, 5):
                torch.set_num_threads(count)
                output = pkg.ops.scaled_dot_product_attention_varlen(
                    *leaves, starts, ends, longest_q, longest_k, causal=True
                )
                gradients = torch.autograd.grad(output.square().sum(), leaves)
                results.append([output.detach(), *gradients])
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal, results[1], results[2]))
        for result in results[1:]:
            for one, other in zip(results[0], result, strict=True):
                torch.testing.assert_close(one, other)

    def test_a_maximum_that_changes_compiles_once(self) -> None:
        compilations = 0

        def counting(graph: Any, _: Any) -> Any:
            nonlocal compilations
            compilations += 1
            return graph

        torch._dynamo.reset()
        compiled = torch.compile(
            pkg.ops.scaled_dot_product_attention_varlen,
            fullgraph=True,
            dynamic=True,
            backend=counting,
        )
        for rows, columns in (((5, 8), (6, 11)), ((9, 3, 7), (5, 5, 10)), ((30, 2), (19, 4))):
            arguments = packed(rows, columns, (2, 2), (12, 12))
            expected = references.scaled_dot_product_attention_varlen(*arguments)
            torch.testing.assert_close(compiled(*arguments), expected)
        torch._dynamo.reset()
        assert compilations == 1


class TestDropout:
    def test_manual_seed_reproduces(self, device: torch.device) -> None:
        arguments = packed((30, 40), (30, 50), (4, 2))
        inputs = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(pkg.ops.scaled_dot_product_attention_varlen(*inputs, 0.5))
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])
        assert (pkg.ops.scaled_dot_product_attention_varlen(*inputs, 1.0) == 0).all()

    def test_draws_what_a_batch_of_equal_lengths_draws(self, device: torch.device) -> None:
        batch, length = 3, 50
        query, key, value, starts, ends, *most = packed((length,) * batch, (length,) * batch)
        inputs = [tensor.to(device) for tensor in (query, key, value)]
        torch.manual_seed(3)
        ours = pkg.ops.scaled_dot_product_attention_varlen(
            *inputs, starts.to(device), ends.to(device), *most, 0.4
        )
        torch.manual_seed(3)
        plain = pkg.ops.scaled_dot_product_attention(
            *(t.unflatten(0, (batch, length)).transpose(1, 2) for t in inputs), dropout_p=0.4
        )
        torch.testing.assert_close(ours, plain.transpose(1, 2).flatten(0, 1))

    def test_vmap(self) -> None:
        query, *rest = packed((5, 3), (4, 6))
        same = query.expand(3, *query.shape)

        def attention(query: Tensor) -> Tensor:
            return pkg.ops.scaled_dot_product_attention_varlen(query, *rest, dropout_p=0.5)

        outputs = torch.vmap(attention, randomness="same")(same)
        assert torch.equal(outputs[0], outputs[1])
        outputs = torch.vmap(attention, randomness="different")(same)
        assert not torch.equal(outputs[0], outputs[1])
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(attention)(same)


DROPPED = [
    (packed((3, 1, 4), (2, 5, 3), (2, 1)), {"causal": True}),
    (packed((35, 3), (200, 30), (4, 2), (8, 9)), {}),
]


class TestAttentionVarlenForward(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default
    reference = staticmethod(forward_reference)
    options = MappingProxyType(
        {
            "autocast": "lower",
            "nondifferentiable_outputs": {1, 2},
            "nondifferentiable_inputs": {"alibi_slopes"},
            "structural_inputs": STRUCTURE,
        }
    )
    # Values are compared of all samples. These checks TestAttentionVarlen makes of every one of the
    # same calls, by the same kernel and formula: here a third, dropout among them.
    one_of = MappingProxyType(dict.fromkeys(("gradients", "layouts", "fake", "compile", "vmap"), 3))

    def samples(self) -> list[Sample]:
        samples = []
        for name, arguments, options, more in attention_calls():
            samples.append(Sample(with_all_arguments(arguments, **options), name=name, **more))
        for index, (operands, options) in enumerate(DROPPED):
            for dropout_p in (0.3, 1.0):
                arguments = with_all_arguments(operands, seed=7, dropout_p=dropout_p, **options)
                samples.append(Sample(arguments, name="dropout", values_only=index > 0))
        for name, arguments, options, more in flash_attention_calls():
            samples.append(Sample(with_all_arguments(arguments, **options), name=name, **more))
        return samples

    def errors(self) -> list[ErrorSample]:
        arguments = packed((3,), (4,))
        wrong = (torch.ones(2, dtype=torch.int64), torch.ones(1))
        call = with_all_arguments(arguments, dropout_p=0.5)
        return [
            ErrorSample(call, match="no dropout_seed"),
            *(ErrorSample((*call[:5], seed, *call[6:]), match="one element") for seed in wrong),
        ]


class TestAttentionVarlenBackward(OperatorTests):
    op = torch.ops.pkg.scaled_dot_product_attention_varlen_backward.default
    reference = staticmethod(backward_reference)
    function = staticmethod(backward_from_inputs)
    # What the forward pass gave in one dtype is not what it gives in another: float64 templates
    # stay float64, and the other dtypes have samples of their own.
    options = MappingProxyType(
        {
            "nondifferentiable_inputs": {
                *("output", "log_sum_exp", "output_residual", "alibi_slopes")
            },
            "structural_inputs": STRUCTURE,
            "dtypes": (torch.float64,),
        }
    )
    # Values are compared of all samples. 3 is no divisor of what repeats among them.
    one_of = MappingProxyType(
        dict.fromkeys(("gradients", "layouts", "vmap", "compile", "fake", "registration"), 3)
    )

    def samples(self) -> list[Sample]:
        samples = []
        traced = ("causal, grouped", "family")  # vmap alone takes seconds for each of them
        for name, arguments, options, more in attention_calls():
            if more.get("differentiable") is False:
                continue
            values = {} if name in traced else {"values_only": True}
            samples.append(self.sample(name, arguments, options, more | values))
            for dtype in FLOATING[1:]:
                operands = tuple(tensor.to(dtype) for tensor in arguments[:3])
                narrow = (*operands, *arguments[3:])
                samples.append(self.sample(name, narrow, options, {"values_only": True}))
        for index, (arguments, options) in enumerate(DROPPED):
            dropped = options | {"seed": 7, "dropout_p": 0.3}
            samples.append(self.sample("dropout", arguments, dropped, {"values_only": index > 0}))
        for name, arguments, options, more in flash_attention_calls():
            values = {} if name == "all, grouped" else {"values_only": True}
            samples.append(self.sample(name, arguments, options, more | values))
            for dtype in FLOATING[1:] if "blocks" in name else ():
                operands = tuple(tensor.to(dtype) for tensor in arguments[:3])
                narrow = (*operands, *arguments[3:])
                options = dict(options)
                if options.get("alibi_slopes") is not None:
                    options["alibi_slopes"] = options["alibi_slopes"].float()
                samples.append(self.sample(name, narrow, options, {"values_only": True}))
        return samples

    def sample(
        self, name: str, arguments: Any, options: dict[str, Any], more: dict[str, Any]
    ) -> Sample:
        inputs = with_all_arguments(arguments, **options)
        extras = inputs[12:]
        outputs = forward_outputs(inputs[:6], inputs[6:11], extras)
        grad = normal(*outputs[0].shape, seed=4).to(outputs[0].dtype)
        return Sample((grad, *inputs[:6], *outputs, *inputs[6:11], *extras), name=name, **more)

    def on_device(self, sample: Sample, device: torch.device) -> Sample:
        moved = super().on_device(sample, device)
        grad, inputs, options = moved.args[0], moved.args[1:7], moved.args[10:]
        outputs = forward_outputs(inputs, options[:5], options[5:])
        return dataclasses.replace(moved, args=(grad, *inputs, *outputs, *options))

    def errors(self) -> list[ErrorSample]:
        query, key, value, starts, ends, *most = packed((3,), (4,), sizes=(4, 4))
        output, log_sum_exp = torch.ones_like(query), torch.ones(2, 3, dtype=torch.float64)
        inputs, empty = (query, key, value, starts, ends, None), query.new_empty(0)
        rest = (*most, 0.0, None, False)

        def refused(match: str, *given: Tensor) -> ErrorSample:
            return ErrorSample((given[0], *inputs, *given[1:], *rest), match=match)

        return [
            refused("grad_output has shape", output[:2], output, log_sum_exp, empty),
            refused("output is torch.float32", output, output.float(), log_sum_exp, empty),
            refused("log_sum_exp has shape", output, output, log_sum_exp.mT, empty),
            refused("output_residual has shape", output, output, log_sum_exp, output[:2]),
        ]

    def test_strided_results_of_the_forward_pass(self, device: torch.device) -> None:
        query, key, value, *rest = packed((9, 4), (7, 30), (4, 2))
        halves = tuple(tensor.bfloat16() for tensor in (query, key, value))
        arguments = with_all_arguments((*halves, *rest))[:-1]
        inputs = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_varlen_forward
        backward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_varlen_backward
        outputs = forward(*inputs, True)
        grad = normal(*outputs[0].shape).to(outputs[0])
        expected = backward(grad, *inputs[:6], *outputs, *inputs[6:])
        strided = [tensor.mT.contiguous().mT for tensor in (grad, *outputs)]
        actual = backward(strided[0], *inputs[:6], *strided[1:], *inputs[6:])
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_residual_is_what_rounding_takes_off_the_output(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Of means of whole numbers, which float32 holds exactly, and so do the two parts together."""
    query, key, value, *rest = packed((40, 1, 8), (64, 32, 512), (4, 2), (8, 19))
    query, key = torch.zeros_like(query, dtype=dtype), key.to(dtype)
    limit = 2 / torch.finfo(dtype).eps  # whole numbers up to there have no more digits
    value = (value * limit / 3).round().clamp(-limit, limit).to(dtype)
    call = with_all_arguments((query, key, value, *rest))
    inputs = [a.to(device) if isinstance(a, Tensor) else a for a in call]
    forward: Callable[..., Any] = torch.ops.pkg.scaled_dot_product_attention_varlen_forward
    output, _, residual = forward(*inputs[:-1], True)
    both = output.double() + residual.double()
    assert (residual != 0).any()
    for rows, columns in (((0, 40), (0, 64)), ((40, 41), (64, 96)), ((41, 49), (96, 608))):
        mean = value[slice(*columns)].double().mean(0).repeat_interleave(2, 0).to(device)
        part = both[slice(*rows)]
        assert torch.equal(part, mean.expand(part.shape))
    alone = forward(*inputs)
    assert torch.equal(alone[0], output)
    assert alone[2].shape == (0,)


def test_gradients_of_many_keys_without_queries(device: torch.device) -> None:
    query, key, value, *rest = packed((0, 2), (1000, 900), sizes=(8, 8))
    leaves = [tensor.float().to(device).requires_grad_() for tensor in (query, key, value)]
    rest = [a.to(device) if isinstance(a, Tensor) else a for a in rest]
    output = pkg.ops.scaled_dot_product_attention_varlen(*leaves, *rest)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert (gradients[2][:1000] == 0).all()
    assert (gradients[2][1000:] != 0).any()
