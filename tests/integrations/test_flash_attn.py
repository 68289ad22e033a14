"""pkg.integrations.flash_attn: flash-attn's functions, beside a plain reference of its meanings.

Results and gradients are held by the rule of pkg.testing: at most twice as far from float64 as the
reference in the same dtype is. The combinations of arguments are a thinned product: every pair of
values of any two arguments occurs.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, combinations, product
from typing import Any

import numpy as np
import pytest
import references
import torch
from samples import normal
from torch import Tensor

from pkg.integrations import flash_attn as ours
from pkg.integrations._key_value_cache import write_where
from pkg.testing import Sample
from pkg.testing.tolerance import expect

WINDOWS = ((-1, -1), (3, -1), (2, 1), (-1, 4), (0, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def every_pair(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Combinations in which each value of each argument meets each of every other."""
    names, draw = list(choices), random.Random(0)

    def pairs_of(chosen: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), 2))

    missing = {
        ((a, x), (b, y))
        for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(choices[names[a]])), range(len(choices[names[b]])))
    }
    while missing:
        candidates = []
        for _ in range(50):
            chosen = [draw.randrange(len(choices[name])) for name in names]
            for place, value in draw.choice(sorted(missing)):
                chosen[place] = value
            candidates.append(tuple(chosen))
        best = max(candidates, key=lambda chosen, missing=missing: len(pairs_of(chosen) & missing))
        missing -= pairs_of(best)
        yield {name: choices[name][index] for name, index in zip(names, best, strict=True)}


def text_of(combination: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in combination.items()).replace(" ", "")


def slopes_of(kind: str | None, batch: int, heads: int) -> Tensor | None:
    if kind is None:
        return None
    shape = (heads,) if kind == "heads" else (batch, heads)
    return normal(*shape, seed=7).abs().float() * 0.3


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
    scale: float | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One sequence, (tokens, heads, size): output, and the logarithms of the sums (heads, L)."""
    rows, columns, heads = len(q), len(k), q.shape[1]
    group = heads // k.shape[1]
    query = q.transpose(0, 1)
    key, value = (each.transpose(0, 1).repeat_interleave(group, 0) for each in (k, v))
    scores = query @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(rows, columns, dtype=torch.bool)
    distance = torch.zeros(rows, columns, dtype=torch.int64)
    for i in range(rows):
        own = i + columns - rows
        for j in range(columns):
            distance[i, j] = abs(own - j)
            if causal and j > own:
                visible[i, j] = False
            if window[0] >= 0 and j < own - window[0]:
                visible[i, j] = False
            if window[1] >= 0 and j > own + window[1]:
                visible[i, j] = False
    if slopes is not None:
        scores = scores - (slopes.double()[:, None, None] * distance).to(scores.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    factors = scores.new_ones(())
    if kept is not None:
        factors = kept.to(scores.dtype) / (1 - dropout_p)
    output = references._AttendToValues.apply(scores, value, factors)
    wide = torch.promote_types(scores.dtype, torch.float32)
    sums = scores.detach().to(wide).logsumexp(-1)
    return output.transpose(0, 1), sums.masked_fill(~visible.any(-1), math.inf)


def results(output: Tensor, log_sum_exp: Tensor | None, inputs: list[Tensor]) -> list[Tensor]:
    """Output, logarithms, and the gradients of a sum with fixed weights."""
    weights = normal(*output.shape, seed=9).to(output.dtype)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return [output.detach(), *([] if log_sum_exp is None else [log_sum_exp]), *gradients]


def check(
    call: Callable[..., tuple[Tensor, Tensor]],
    reference: Callable[..., tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    dtype: torch.dtype,
) -> None:
    sample = Sample(tuple(tensors)).converted(dtype)

    def evaluate(function: Callable[..., Any], sample: Sample) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in sample.args]
        return results(*function(*leaves), leaves)

    actual = evaluate(call, sample)
    expected = expect(lambda sample: evaluate(reference, sample), sample)
    names = ["output", "log_sum_exp", *(f"gradient {i}" for i in range(len(tensors)))]
    for name, each, value in zip(names, expected, actual, strict=True):
        each.compare(value, name)


def stacked(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts])


DENSE = list(
    every_pair(
        causal=(False, True),
        window=WINDOWS,
        softcap=(0.0, 1.5),
        alibi=(None, "heads", "batch"),
        lengths=((5, 9), (9, 5), (33, 70), (1, 12), (20, 20)),
        heads=((4, 2), (2, 2), (3, 1)),
        dtype=DTYPES,
        scale=(None, 0.7),
    )
)


@pytest.mark.parametrize("options", DENSE, ids=text_of)
def test_sequences_of_one_length(options: dict[str, Any]) -> None:
    (rows, columns), (heads, key_heads) = options["lengths"], options["heads"]
    tensors = [
        normal(2, rows, heads, 8),
        normal(2, columns, key_heads, 8, seed=1),
        normal(2, columns, key_heads, 12, seed=2),
    ]
    slopes = slopes_of(options["alibi"], 2, heads)
    rules = (options["causal"], options["window"], options["softcap"])

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scale, causal, window, softcap = options["scale"], *rules
        alone = ours.flash_attn_func(q, k, v, 0.0, scale, causal, window, softcap, slopes)
        output, log_sum_exp, weights = ours.flash_attn_func(
            q, k, v, 0.0, scale, causal, window, softcap, slopes, True, True
        )
        assert torch.equal(alone, output)
        assert weights.numel() == 0
        return output, log_sum_exp

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        each = slopes if slopes is None or slopes.dim() == 2 else slopes.expand(2, -1)
        return stacked(
            [
                plain_attention(
                    *(q[b], k[b], v[b], *rules), None if each is None else each[b], options["scale"]
                )
                for b in range(2)
            ]
        )

    check(call, reference, tensors, options["dtype"])


VARLEN = list(
    every_pair(
        causal=(False, True),
        window=WINDOWS,
        softcap=(0.0, 1.5),
        alibi=(None, "heads", "batch"),
        lengths=(((3, 8, 1), (5, 8, 20)), ((7, 0, 2), (3, 4, 0)), ((40, 5), (40, 33))),
        heads=((4, 2), (2, 2)),
        dtype=DTYPES,
        paged=(False, True),
        padding=((0, 0), (0, 5), (3, 2)),
    )
)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def in_pages(tensor: Tensor, lengths: tuple[int, ...], page: int) -> tuple[Tensor, Tensor]:
    """The sequences of a packed tensor in pages that lie in no order, and where they are."""
    longest = max(-(-length // page) for length in lengths)
    pages = tensor.new_full((longest * len(lengths) + 2, page, *tensor.shape[1:]), math.nan)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(3))
    table = order[: longest * len(lengths)].view(len(lengths), longest).int()
    start = 0
    for b, length in enumerate(lengths):
        for place in range(length):
            pages[table[b, place // page], place % page] = tensor[start + place]
        start += length
    return pages, table


@pytest.mark.parametrize("options", VARLEN, ids=text_of)
def test_packed_sequences(options: dict[str, Any]) -> None:
    """Padding in front of the sequences and behind them, which NaN must not leave, gives zeros."""
    (rows, columns), (heads, key_heads) = options["lengths"], options["heads"]
    front, behind = options["padding"]
    tensors = [
        normal(sum(rows), heads, 8),
        normal(sum(columns), key_heads, 8, seed=1),
        normal(sum(columns), key_heads, 8, seed=2),
    ]
    slopes = slopes_of(options["alibi"], len(rows), heads)
    rules = (options["causal"], options["window"], options["softcap"])
    most = (max(rows), max(columns) + 3)

    def pad(packed: Tensor) -> Tensor:
        ends = (packed.new_full((count, *packed.shape[1:]), math.nan) for count in (front, behind))
        return torch.cat([next(ends), packed, next(ends)])

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        table = None
        if options["paged"]:
            k, table = in_pages(k, columns, 4)
            v, _ = in_pages(v, columns, 4)
        else:
            k, v = pad(k), pad(v)
        starts = (offsets(rows) + front, offsets(columns) + front)
        arguments = (pad(q), k, v, *starts, *most, 0.0, None, *rules, slopes)
        alone = ours.flash_attn_varlen_func(*arguments, block_table=table)
        output, log_sum_exp, weights = ours.flash_attn_varlen_func(*arguments, False, True, table)
        assert torch.equal(alone, output)
        assert weights.numel() == 0
        covered = slice(front, front + len(q))
        is_padding = torch.ones(len(output), dtype=torch.bool).index_fill(
            0, torch.arange(len(output))[covered], False
        )
        assert (output[is_padding] == 0).all()
        assert (log_sum_exp[:, is_padding] == torch.inf).all()
        return output[covered], log_sum_exp[:, covered]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            plain_attention(
                *(query, key, value, *rules),
                slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
            )
            for b, (query, key, value) in enumerate(
                zip(q.split(rows), k.split(columns), v.split(columns), strict=True)
            )
        ]
        return torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts], -1)

    check(call, reference, tensors, options["dtype"])


def test_packed_tensors_are_views_of_one() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    options = (0.0, 0.4, True, (2, 0), 1.5, torch.rand(4), False, True)
    expected = ours.flash_attn_func(q, k, v, *options)
    for actual in (
        ours.flash_attn_qkvpacked_func(qkv, *options),
        ours.flash_attn_kvpacked_func(q, qkv[:, :, 1:], *options),
    ):
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    starts, packed = offsets((2, 9, 1)), qkv.flatten(0, 1)
    q, k, v = packed.unbind(1)
    expected = ours.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, *options)
    for actual in (
        ours.flash_attn_varlen_qkvpacked_func(packed, starts, 9, *options),
        ours.flash_attn_varlen_kvpacked_func(q, packed[:, 1:], starts, starts, 9, 9, *options),
    ):
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_dropout_and_the_weights() -> None:
    """The weights' signs say what was dropped, and with them the reference gives the output."""
    rows, columns = (5, 8), (7, 4)
    q, k, v = normal(13, 4, 8), normal(11, 2, 8, seed=1), normal(11, 2, 8, seed=2)
    slopes = torch.rand(2, 4)
    rules = (True, (4, -1), 1.5)
    arguments = (q, k, v, offsets(rows), offsets(columns), 8, 9, 0.4, None, *rules, slopes)
    torch.manual_seed(5)
    output, sums, weights = ours.flash_attn_varlen_func(*arguments, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(ours.flash_attn_varlen_func(*arguments), output)
    assert weights.shape == (2, 4, 8, 9)
    q_parts, k_parts, v_parts = q.split(rows), k.split(columns), v.split(columns)
    for b, (first, length) in enumerate(zip((0, 5), rows, strict=True)):
        part = weights[b, :, :length, : columns[b]]
        kept = ~torch.signbit(part)
        expected, of_sums = plain_attention(
            q_parts[b], k_parts[b], v_parts[b], *rules, slopes[b], None, kept, 0.4
        )
        torch.testing.assert_close(output[first : first + length], expected)
        torch.testing.assert_close(sums[:, first : first + length], of_sums)
        seen = part.abs().sum(-1)
        torch.testing.assert_close(seen, torch.where(of_sums.isinf(), 0.0, 1.0).to(seen.dtype))
        assert not kept.all()
        assert kept.any()

    q, k, v = normal(2, 6, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    output, sums, weights = ours.flash_attn_func(
        q, k, v, 0.3, None, *rules, slopes, return_attn_probs=True
    )
    for b in range(2):
        kept = ~torch.signbit(weights[b])
        expected, _ = plain_attention(q[b], k[b], v[b], *rules, slopes[b], None, kept, 0.3)
        torch.testing.assert_close(output[b], expected)


CACHES = list(
    every_pair(
        queries=(1, 3, 20),
        new=(0, 3),
        causal=(False, True),
        window=((-1, -1), (5, -1), (2, 1)),
        softcap=(0.0, 1.5),
        alibi=(None, "heads", "batch"),
        kind=("plain", "rows", "leftpad", "rows and leftpad", "paged"),
        heads=((4, 2), (2, 2)),
        rotary=(None, "interleaved", "halves"),
        lengths=("tensor", "number"),
        sums=(False, True),
        dtype=(torch.float32, torch.bfloat16, torch.float64),
    )
)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor, places: list[int], pairs: bool) -> Tensor:
    """(tokens, heads, size), element by element."""
    result, half = x.clone(), cos.shape[1]
    for t, place in enumerate(places):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if pairs else (i, i + half)
            result[t, :, a] = x[t, :, a] * cos[place, i] - x[t, :, b] * sin[place, i]
            result[t, :, b] = x[t, :, a] * sin[place, i] + x[t, :, b] * cos[place, i]
    return result


@pytest.mark.parametrize("options", CACHES, ids=text_of)
def test_a_cache_of_keys_and_values(options: dict[str, Any]) -> None:
    batch, room, (heads, key_heads) = 3, 24, options["heads"]
    queries, new, kind = options["queries"], options["new"], options["kind"]
    filled = [7, 20, 2] if options["lengths"] == "tensor" else [9] * batch
    lengths: Any = 9 if options["lengths"] == "number" else torch.tensor(filled, dtype=torch.int32)
    pad = [4, 0, 5] if "leftpad" in kind else [0] * batch
    slopes = slopes_of(options["alibi"], batch, heads)
    rules = (options["causal"], options["window"], options["softcap"])
    rotary = options["rotary"] if new else None
    rows, table, page = [0, 1, 2], None, room
    if "rows" in kind:
        rows = [4, 0, 2]
    cache_shape: tuple[int, ...] = (5, room)
    if kind == "paged":
        page = 8
        table = torch.tensor([[6, 0, 3], [9, 8, 1], [2, 4, 7]], dtype=torch.int32)
        cache_shape = (10, page)
    tensors = [
        normal(batch, queries, heads, 8),
        normal(*cache_shape, key_heads, 8, seed=1),
        normal(*cache_shape, key_heads, 12, seed=2),
        normal(batch, new, key_heads, 8, seed=3),
        normal(batch, new, key_heads, 12, seed=4),
        normal(48, 3, seed=5).cos(),
        normal(48, 3, seed=5).sin(),
    ]
    sample = Sample(tuple(tensors)).converted(options["dtype"])

    def call(sample: Sample) -> list[Tensor]:
        q, keys, values, k, v, cos, sin = (tensor.clone() for tensor in sample.args)
        result = ours.flash_attn_with_kvcache(
            *(q, keys, values, k if new else None, v if new else None),
            *((cos, sin) if rotary else (None, None)),
            lengths,
            torch.tensor(rows) if "rows" in kind else None,
            torch.tensor(pad, dtype=torch.int32) if "leftpad" in kind else None,
            table,
            None,
            *rules,
            rotary == "interleaved",
            slopes,
            0,
            options["sums"],
        )
        result = result if options["sums"] else (result,)
        return [*result, keys, values]

    def reference(sample: Sample) -> list[Tensor]:
        q, keys, values, k, v, cos, sin = (tensor.clone() for tensor in sample.args)
        parts = []
        for b in range(batch):

            def at(place: int, b: int = b) -> tuple[int, int]:
                return (rows[b], place) if table is None else (
                    int(table[b, place // page]), place % page
                )  # fmt: skip

            places = [filled[b] + step for step in range(new)]
            turned, query = k[b], q[b]
            if rotary:
                pairs = rotary == "interleaved"
                turned = plain_rotary(k[b], cos, sin, places, pairs)
                moves = options["causal"] or max(options["window"]) >= 0
                own = [filled[b] + step * moves for step in range(queries)]
                query = plain_rotary(q[b], cos, sin, own, pairs)
            for step, place in enumerate(places):
                keys[at(place)], values[at(place)] = turned[step], v[b, step]
            seen = range(pad[b], filled[b] + new)
            key, value = (
                torch.stack([each[at(place)] for place in seen])
                if seen
                else each.new_zeros(0, *each.shape[2:])
                for each in (keys, values)
            )
            own_slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
            parts.append(plain_attention(query, key, value, *rules, own_slopes))
        output, sums = stacked(parts)
        return [output, *([sums] if options["sums"] else []), keys, values]

    for each, value in zip(expect(reference, sample), call(sample), strict=True):
        each.compare(value, "output, sums or cache")


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [5, 0, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotary_embedding(dtype: torch.dtype, offsets: int | list[int], pairs: bool) -> None:
    """Of sequences of one length, and of the same packed, with tokens of none around them."""
    x = normal(3, 4, 2, 10).to(dtype).requires_grad_()
    cos, sin = (each.to(dtype) for each in (normal(12, 4).cos(), normal(12, 4).sin()))
    firsts = offsets if isinstance(offsets, list) else [offsets] * 3
    given = torch.tensor(offsets, dtype=torch.int32) if isinstance(offsets, list) else offsets

    def reference(sample: Sample) -> list[Tensor]:
        x, cos, sin = sample.args
        each = zip(x, firsts, strict=True)
        places = range(4)
        return [
            torch.stack(
                [plain_rotary(a, cos, sin, [first + p for p in places], pairs) for a, first in each]
            )
        ]

    (expected,) = expect(reference, Sample((x.detach(), cos, sin)))
    turned = ours.apply_rotary_emb(x, cos, sin, pairs, seqlen_offsets=given)
    expected.compare(turned.detach(), "turned")
    padded = torch.cat([x.new_ones(2, 2, 10), x.flatten(0, 1), x.new_ones(1, 2, 10)])
    starts = torch.tensor([2, 6, 10, 14], dtype=torch.int32)
    packed = ours.apply_rotary_emb(padded, cos, sin, pairs, False, given, starts, 4)
    assert torch.equal(packed[2:-1].unflatten(0, (3, 4)), turned)
    (gradient,) = torch.autograd.grad(turned.square().sum() / 2, x)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient, x.detach(), rtol=tolerance, atol=tolerance)
    copy = x.detach().clone()
    assert ours.apply_rotary_emb(copy, cos, sin, pairs, True, given) is copy
    assert torch.equal(copy, turned)


def test_rotary_embedding_refuses_what_does_not_fit() -> None:
    x, table = torch.zeros(2, 3, 1, 4), torch.zeros(3, 2)
    for arguments, words in (
        ((x[0], table, table), "x is of shape .* it must be \\(batch, tokens, heads, size"),
        ((x, table, table[:2]), "both must be \\(positions, half of what is turned"),
        ((x, table.repeat(1, 2), table.repeat(1, 2)), "cos has 4 columns, which turn 8"),
        (
            (x, table, table, False, False, 1),
            "cos is asked for rows that are 1 to 3; .* between 0 and 2",
        ),
        ((x, table, table, False, False, -1), "cos is asked for rows that are -1 to 1"),
        ((x, table, table, False, False, 0, torch.tensor([0, 3])), "it must be \\(tokens, heads"),
        (
            (x, table, table, False, False, torch.tensor([0, 0, 0])),
            "seqlen_offsets is torch.int64 of shape .3.; it must be int32 or int64 of shape .2.",
        ),
        (
            (x, table, table, False, False, torch.tensor([True, False])),
            "seqlen_offsets is torch.bool",
        ),
        (
            (x[0], table, table, False, False, 0, torch.tensor([0, 2, 1, 3])),
            "cu_seqlens has lengths of sequences that are -1 to 2",
        ),
        (
            (x[0], table, table, False, False, 0, torch.tensor([0, 4])),
            "cu_seqlens has offsets that are 0 to 4; .* between 0 and 3",
        ),
        (
            (x[0], table, table, False, False, torch.tensor([0]), torch.tensor([0, 1, 3])),
            "seqlen_offsets is torch.int64 of shape .1.; .* of shape .2.",
        ),
    ):
        with pytest.raises(RuntimeError, match=words):
            ours.apply_rotary_emb(*arguments)


def test_the_signatures_are_flash_attns() -> None:
    """Names, order and defaults of flash-attn 2.8, so that calls by position mean the same."""
    options = (
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    )
    lengths = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    signatures = {
        "flash_attn_func": f"q, k, v, {options}",
        "flash_attn_kvpacked_func": f"q, kv, {options}",
        "flash_attn_qkvpacked_func": f"qkv, {options}",
        "flash_attn_varlen_func": f"q, k, v, {lengths}, {options}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {lengths}, {options}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {options}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
        ),
    }
    signatures["apply_rotary_emb"] = (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None"
    )
    assert sorted(signatures) == sorted(ours.__all__)
    for name, expected in signatures.items():
        parameters = inspect.signature(getattr(ours, name)).parameters.values()
        actual = (
            each.name if each.default is each.empty else f"{each.name}={each.default!r}"
            for each in parameters
        )
        assert ", ".join(actual) == expected


def cache_call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 2, 4),
        "k_cache": torch.zeros(2, 6, 1, 4),
        "v_cache": torch.zeros(2, 6, 1, 4),
    }
    return ours.flash_attn_with_kvcache(**(arguments | changes))


NEW = {"k": torch.zeros(2, 2, 1, 4), "v": torch.zeros(2, 2, 1, 4)}
ROTARY = {"rotary_cos": torch.zeros(9, 2), "rotary_sin": torch.zeros(9, 2)}
TABLE = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 2, 4)}, "q is of shape .* must be .batch, tokens, heads, size"),
        ({"q": torch.zeros(2, 1, 2, 4, requires_grad=True)}, "inference alone"),
        (
            {"cache_seqlens": 7, "cache_leftpad": TABLE[:, 0]},
            "cache_seqlens has numbers of places that are 7 to 7; .* 0 and 6",
        ),
        (
            {"cache_seqlens": -1, "cache_leftpad": TABLE[:, 0]},
            "cache_seqlens has numbers of places that are -1 to -1",
        ),
        (
            {"v_cache": torch.zeros(2, 5, 1, 4)},
            "k_cache is torch.float32 of shape .* must be equal",
        ),
        ({"block_table": TABLE, "cache_batch_idx": TABLE[:, 0]}, "cache_batch_idx and block_table"),
        ({"block_table": TABLE, "cache_leftpad": TABLE[:, 0]}, "cache_leftpad and block_table"),
        ({"block_table": TABLE[:1]}, "block_table is torch.int32 of shape .1, 1."),
        ({"cache_batch_idx": TABLE[:1, 0]}, "cache_batch_idx is torch.int32 of shape .1."),
        ({"v_cache": torch.zeros(2, 6, 1, 4).half()}, "and v_cache torch.float16 of"),
        ({"block_table": TABLE.float()}, "block_table is torch.float32"),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens is torch.float32"),
        ({"q": torch.zeros(3, 1, 2, 4)}, "k_cache has 2 rows and q a batch of 3"),
        ({"k": NEW["k"], "cache_seqlens": 1}, "of k and v only one"),
        (NEW, "k is given without cache_seqlens"),
        (NEW | {"cache_seqlens": 5}, "places of a sequence that are 5 to 6; .* 0 and 5"),
        (NEW | {"v": torch.zeros(2, 1, 1, 4), "cache_seqlens": 1}, "v is .* it must be"),
        (ROTARY, "rotary_cos or rotary_sin is given without k"),
        (NEW | {"rotary_cos": ROTARY["rotary_cos"], "cache_seqlens": 1}, "only one is given"),
        (
            NEW | ROTARY | {"rotary_sin": torch.zeros(9, 1), "cache_seqlens": 1},
            "rotary_cos is of shape",
        ),
        (
            NEW
            | {"rotary_cos": torch.zeros(2, 2), "rotary_sin": torch.zeros(2, 2)}
            | {"cache_seqlens": 1},
            "rotary_cos is asked for rows that are 1 to 2",
        ),
        (
            NEW
            | {"rotary_cos": torch.zeros(9, 3), "rotary_sin": torch.zeros(9, 3)}
            | {"cache_seqlens": 1},
            "rotary_cos has 3 columns",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_cache(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"flash_attn_with_kvcache: .*{words}"):
        cache_call(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 1, 2, 4).double()}, "q is torch.float64 .* must be torch.float32"),
        ({"q": torch.zeros(2, 1, 2, 5)}, "heads of size 4"),
        ({"q": torch.zeros(2, 1, 3, 4)}, "a multiple of 2 heads"),
        (
            {"block_table": torch.tensor([[-1], [0]])},
            "new keys on pages that are -1 to 0; .* and 1",
        ),
        ({"block_table": torch.tensor([[1], [2]])}, "new keys on pages that are 1 to 2; .* and 1"),
        ({"cache_batch_idx": torch.tensor([-1, 0])}, "new keys on rows that are -1 to 0; .* and 1"),
        ({"cache_leftpad": torch.tensor([1])}, "cache_leftpad is torch.int64 of shape .1."),
        ({"cache_leftpad": torch.tensor([0, -1])}, "of places that are -1 to 0; .* 0 and 6"),
        ({"cache_leftpad": torch.tensor([7, 0])}, "of places that are 0 to 7; .* 0 and 6"),
        ({"cache_seqlens": torch.tensor([2, 5])}, "places of a sequence that are 2 to 6"),
        (
            {"rotary_cos": torch.ones(9, 2, requires_grad=True), "rotary_sin": torch.ones(9, 2)},
            "inference alone",
        ),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "inference alone"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes is torch.float32 of shape .3. .* .2. or"),
        ({"alibi_slopes": torch.ones(2).half()}, "alibi_slopes is torch.float16"),
        ({"softcap": math.nan}, "softcap is nan; it must be finite"),
        ({"v_cache": torch.zeros(1, 6, 2, 4).expand(2, -1, -1, -1)}, "v_cache is .* clone it"),
    ],
)
def test_what_is_refused_leaves_the_cache_as_it_was(changes: dict[str, Any], words: str) -> None:
    keys, values = torch.zeros(2, 6, 2, 4), torch.zeros(2, 6, 2, 4)
    new = {name: torch.ones(2, 2, 2, 4) for name in ("k", "v")}
    caches = {"k_cache": keys, "v_cache": values, "cache_seqlens": 1}
    with pytest.raises(RuntimeError, match=f"flash_attn_with_kvcache: .*{words}"):
        cache_call(**(caches | new | changes))
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("name", ["plain", "weights", "packed", "cache", "copied cache", "sums"])
def test_autocast_computes_in_its_dtype(name: str) -> None:
    """As :func:`pkg.ops.scaled_dot_product_attention` does."""
    queries = 20 if name == "copied cache" else 4
    q = normal(2, queries, 2, 8).float()
    k, v = (normal(2, 24, 2, 8, seed=seed).float() for seed in (1, 2))
    starts = torch.arange(3) * 24
    rows = torch.arange(3) * queries
    packed = (rows, starts, queries, 24, 0.0, None, True, (-1, -1), 0.0, None, False, True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if name in ("plain", "weights"):
            return ours.flash_attn_func(q, k, v, causal=True, return_attn_probs=name == "weights")
        if name == "packed":
            return ours.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *packed)
        sums = {"return_softmax_lse": name == "sums"}
        return ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=24, causal=True, **sums)

    with torch.autocast("cpu", torch.bfloat16):
        results = call(q, k, v)
    expected = call(*(each.bfloat16() for each in (q, k, v)))
    if not isinstance(results, tuple):
        results, expected = (results,), (expected,)
    assert results[0].dtype == torch.bfloat16
    for result, other in zip(results[:2], expected[:2], strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize(
    "exists", [(True, False, True), (False, True, True), (False,) * 3], ids=str
)
def test_keys_without_a_place_are_left_out(exists: tuple[bool, ...]) -> None:
    """What CUDA devices, where nobody looks at the values, do instead of a refusal."""
    cache, new = normal(3, 2, 2, 4), normal(1, 3, 2, 4, seed=1)
    pages, places = torch.tensor([[2, 0, 1]]), torch.tensor([[1, 0, 0]])
    expected = cache.clone()
    for t, is_there in enumerate(exists):
        if is_there:
            expected[pages[0, t], places[0, t]] = new[0, t]
    there = torch.tensor([exists])
    # Pages of others and of none.
    index = (pages.where(there, torch.tensor([[-1, 9, 5]])), places.where(there, -3))
    write_where(there, index, (cache, new))
    assert torch.equal(cache, expected)


def test_a_number_of_keys_is_whole() -> None:
    with pytest.raises(TypeError, match="cache_seqlens is of type float; it must be a whole"):
        cache_call(cache_seqlens=1.7)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_no_queries_of_a_cache(causal: bool, sums: bool) -> None:
    output = cache_call(q=torch.zeros(2, 0, 2, 4), causal=causal, return_softmax_lse=sums)
    assert (output[0] if sums else output).shape == (2, 0, 2, 4)


@pytest.mark.tracing
def test_places_are_looked_at_by_a_compiled_program() -> None:
    """Which nothing of the arguments' values is known of while it is compiled."""
    x, table = torch.ones(2, 3, 1, 4), torch.rand(8, 2)
    turn = torch.compile(ours.apply_rotary_emb, fullgraph=True, backend="aot_eager")
    for offset in (2, torch.tensor([0, 5])):
        turned = turn(x, table, table, seqlen_offsets=offset)
        expected = ours.apply_rotary_emb(x, table, table, seqlen_offsets=offset)
        torch.testing.assert_close(turned, expected)
    with pytest.raises(RuntimeError, match="cos is asked for rows that are out of range"):
        turn(x, table, table, seqlen_offsets=torch.tensor([0, 6]))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def append(keys: Tensor, lengths: Tensor, pages: Tensor) -> Tensor:
        new = torch.ones(2, 2, 1, 4)
        return ours.flash_attn_with_kvcache(
            *(new, keys, torch.ones(3, 4, 1, 4), new, new, table, table),
            cache_seqlens=lengths,
            block_table=pages,
        )

    keys = torch.zeros(3, 4, 1, 4)
    output = append(keys, torch.tensor([0, 5]), torch.tensor([[2, 0], [0, 1]]))
    torch.testing.assert_close(output, torch.ones(2, 2, 1, 4))
    assert keys[:, :, 0].any(-1).sum(-1).tolist() == [0, 2, 2]
    with pytest.raises(RuntimeError, match="places of a sequence that are out of range"):
        append(keys, torch.tensor([0, 7]), torch.tensor([[2, 0], [0, 1]]))
    with pytest.raises(RuntimeError, match="new keys on pages that are out of range"):
        append(keys, torch.tensor([0, 5]), torch.tensor([[-1, 0], [0, 1]]))


def test_a_negative_softcap_is_none() -> None:
    """By flash-attn's words: "<= 0.0 means deactivate"."""
    q, starts = torch.randn(1, 5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    for softcap in (-1.0, 0.0):
        dense = ours.flash_attn_func(q, q, q, causal=True, softcap=softcap)
        packed = ours.flash_attn_varlen_func(
            *(q[0], q[0], q[0], starts, starts, 5, 5), causal=True, softcap=softcap
        )
        cached = ours.flash_attn_with_kvcache(
            q, q, q, cache_seqlens=5, causal=True, softcap=softcap
        )
        expected = ours.flash_attn_func(q, q, q, causal=True)
        for result in (dense, packed[None], cached):
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("window_size", [None, (-1,), (None, None), (1.5, 0), 3, (1, 2, 3)])
def test_a_window_is_two_whole_numbers(window_size: Any) -> None:
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(TypeError, match=r"window_size is .*; it must be two whole numbers"):
        ours.flash_attn_func(q, q, q, window_size=window_size)


def test_a_window_is_of_any_kind_of_whole_number() -> None:
    q = torch.randn(1, 5, 2, 4)
    expected = ours.flash_attn_func(q, q, q, window_size=(2, -1))
    given = ours.flash_attn_func(q, q, q, window_size=[np.int64(2), torch.tensor(-7)])
    assert torch.equal(given, expected)


def test_softcap_is_a_number() -> None:
    q, cache = torch.zeros(1, 3, 2, 4), torch.zeros(1, 6, 2, 4)
    words = "softcap is None; it must be a number, 0 for none"
    with pytest.raises(TypeError, match=words):
        ours.flash_attn_func(q, q, q, softcap=None)
    with pytest.raises(TypeError, match=words):
        ours.flash_attn_with_kvcache(q, cache, cache, softcap=None)


def test_what_cannot_be_done_is_refused() -> None:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(RuntimeError, match="flash_attn_func: q, k and v have batches of 2, 1"):
        ours.flash_attn_func(q, k, k)
    with pytest.raises(RuntimeError, match="flash_attn_func: k is of shape"):
        ours.flash_attn_func(q, k[0], k)
    with pytest.raises(RuntimeError, match="flash_attn_qkvpacked_func: qkv is of shape"):
        ours.flash_attn_qkvpacked_func(q)
    with pytest.raises(RuntimeError, match="flash_attn_varlen_kvpacked_func: kv is of shape"):
        ours.flash_attn_varlen_kvpacked_func(q[0], k, offsets((3,)), offsets((3,)), 3, 3)
    with pytest.raises(RuntimeError, match="alibi_slopes requires a gradient"):
        ours.flash_attn_func(q.requires_grad_(), q, q, alibi_slopes=q.new_ones(4).requires_grad_())


PAGED: dict[str, Any] = {
    "q": torch.zeros(5, 1, 8),
    "k": torch.zeros(2, 4, 1, 8),
    "v": torch.zeros(2, 4, 1, 8),
    "cu_seqlens_q": offsets((5,)),
    "cu_seqlens_k": offsets((5,)),
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
    "block_table": torch.zeros(1, 2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_table": torch.tensor([[0]])}, "5 to 5 keys; .* 1 pages of 4 hold no more"),
        ({"block_table": torch.tensor([[0, -1]])}, "pages in use that are -1 to 0"),
        ({"block_table": torch.tensor([[2, 0]])}, "pages in use that are 0 to 2; .* 0 and 1"),
        ({"block_table": torch.tensor([0, 0])}, "block_table is of shape .2."),
        ({"v": torch.zeros(2, 5, 1, 8)}, "keys are of shape .* and differ in the last alone"),
        ({"cu_seqlens_k": torch.tensor([5, 2])}, "none can have fewer than 0"),
    ],
)
def test_pages_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"flash_attn_varlen_func: .*{words}"):
        ours.flash_attn_varlen_func(**(PAGED | changes))


def test_pages_behind_the_keys_are_not_read() -> None:
    table = torch.tensor([[1, 0, -1, 7]])
    assert ours.flash_attn_varlen_func(**(PAGED | {"block_table": table})).shape == (5, 1, 8)
