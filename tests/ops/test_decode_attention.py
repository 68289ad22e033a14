from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample
from pkg.testing.tolerance import expect

decode_attention = pkg.ops.decode_attention


def lengths_of(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(lengths, dtype=dtype)


def call(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (2, 1),
    rows: int = 1,
    keys: int | None = None,
    sizes: tuple[int, int] = (8, 8),
    caches: int = 0,
    **options: object,
) -> Sample:
    """Sequences of these lengths; ``heads`` of the query and of the caches, more ``caches``."""
    keys = max(lengths) if keys is None else keys
    batch = len(lengths)
    query = normal(batch, heads[0], rows, sizes[0])
    key = normal(batch + caches, heads[1], keys, sizes[0], seed=1)
    value = normal(batch + caches, heads[1], keys, sizes[1], seed=2)
    return Sample((query, key, value, lengths_of(*lengths)), **options)


def paged(
    lengths: tuple[int, ...],
    page_size: int,
    heads: tuple[int, int] = (2, 1),
    rows: int = 1,
    sizes: tuple[int, int] = (8, 8),
    table_pages: int | None = None,
    scale: float | None = None,
    **options: object,
) -> Sample:
    """The same in pages, handed out in no order; two sequences may share one."""
    batch, needed = len(lengths), -(-max(lengths) // page_size)
    table_pages = needed if table_pages is None else table_pages
    pages = max(batch * table_pages - 1, 1)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * table_pages, generator=generator) % pages
    table = order.reshape(batch, table_pages).int()
    query = normal(batch, heads[0], rows, sizes[0])
    key = normal(pages, heads[1], page_size, sizes[0], seed=1)
    value = normal(pages, heads[1], page_size, sizes[1], seed=2)
    lengths_wide = lengths_of(*lengths, dtype=torch.int64)
    return Sample((query, key, value, lengths_wide, table, scale), **options)


def checked(sample: Sample, device: torch.device) -> None:
    """Compares a call with the reference."""
    (expected,) = expect(lambda each: [references.decode_attention(*each.args)], sample)
    moved = sample.map_tensors(lambda tensor: tensor.to(device))
    expected.compare(decode_attention(*moved.args).cpu(), str(sample))


class TestDecodeAttention(OperatorTests):
    op = torch.ops.pkg.decode_attention.default
    reference = staticmethod(references.decode_attention)
    function = staticmethod(decode_attention)
    options = MappingProxyType({"autocast": "lower", "without": {"gradients"}})
    one_of = MappingProxyType({"layouts": 3, "fake": 3})

    def samples(self) -> list[Sample]:
        samples = [
            call((5, 3), keys=6),
            call((4,), heads=(3, 3), rows=2, sizes=(4, 6), caches=1),
            paged((7, 2), 3, rows=2),
            paged((4, 4), 2, heads=(4, 2), scale=0.3),
            call((), keys=3),
            call((0, 2), rows=0),
            call((2, 3), heads=(0, 0)),
            call((2, 3), sizes=(0, 4)),
            call((2, 3), sizes=(4, 0)),
            call((0, 0), keys=0),
        ]
        for keys, size in ((11, 10), (19, 7), (70, 17)):
            lengths, sizes = (keys, keys - 2), (size, size + 5)
            samples.append(call(lengths, (4, 2), 3, keys + 1, sizes, 2, family="keys"))
            samples.append(paged(lengths, 2, (4, 2), 3, sizes, family="pages"))
        return samples + self.long_samples() + self.flash_attention_samples()

    def flash_attention_samples(self) -> list[Sample]:
        """With a window, capped scores and ALiBi's slopes, in all ways in which rows see keys."""

        def extended(sample: Sample, window: int, softcap: float, slopes: Tensor | None) -> Sample:
            given = (*sample.args, None, None)[:6]
            return replace(sample, args=(*given, window, softcap, slopes))

        # Powers of two, which autocast's dtypes hold exactly.
        slopes = 0.5 ** torch.arange(8.0)
        samples = [
            extended(call((5, 3), keys=6), 1, 0.0, None),
            extended(paged((7, 2), 3, rows=2), 3, 1.5, slopes[:2]),
            extended(call((4, 6), (4, 2), 2), -1, 2.0, slopes.view(2, 4)),
            extended(paged((7, 2), 3, (4, 2), rows=2), 3, 0.0, slopes.view(2, 4)),
        ]
        for rows in (1, 2, 5, 8):
            for window in (0, 1, 6, 70, 2**63 - 1):
                sample = call((90, rows, 300), (6, 2), rows, values_only=True)
                samples.append(extended(sample, window, 0.0, None))
                sample = paged((700, 3, 64), 16, (6, 2), rows, values_only=True)
                of_each = normal(3, 12, seed=7)[:, ::2] / 20
                samples.append(extended(sample, window, 3.0, of_each))
        return samples

    def long_samples(self) -> list[Sample]:
        """Around the widths of registers and blocks, and where keys are split among tasks."""
        samples = []
        for keys in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 300, 1025):
            samples.append(call((keys, keys // 2), values_only=True))
            samples.append(call((keys,), (3, 1), 2, keys + 3, (20, 33), values_only=True))
        for size in (1, 3, 7, 15, 16, 17, 31, 32, 33, 64, 65, 80, 128, 129, 256, 300):
            samples.append(call((70, 9), sizes=(size, size), values_only=True))
        for rows in range(1, 10):
            samples.append(call((90, rows, 4), (6, 2), rows, values_only=True))
        for page_size in (1, 2, 5, 16, 64, 100):
            samples.append(paged((130, 0, 71), page_size, (8, 2), 2, (16, 8), values_only=True))
        samples.append(paged((600,), 16, (1, 1), 8, (40, 24), 50, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        query, cache, lengths = torch.ones(2, 4, 1, 8), torch.ones(2, 2, 5, 8), lengths_of(5, 3)
        table = torch.zeros(2, 3, dtype=torch.int32)

        def wrong(match: str, *changes: Tensor | None) -> ErrorSample:
            arguments = [query, cache, cache, lengths, None]
            for position, change in enumerate(changes):
                arguments[position] = arguments[position] if change is None else change
            return ErrorSample(tuple(arguments), match=match)

        return [
            wrong(r"query has shape \(4, 1, 8\); it must have shape \(batch", query[0]),
            wrong(r"key_cache has shape \(2, 5, 8\); .*\(batch, heads, keys", None, cache[0]),
            wrong(r"value_cache has shape \(2, 5, 8\)", None, None, cache[0]),
            wrong(r"must have shape \(pages, heads, page", None, cache[0], None, None, table),
            wrong("query is torch.float32 but key_cache is torch.float64", None, cache.double()),
            wrong("query is torch.float32 but value_cache", None, None, cache.half()),
            wrong("query is torch.int64; supported", query.long(), cache.long(), cache.long()),
            wrong("cache_lengths is torch.float32; it must be", None, None, None, lengths.float()),
            wrong("block_table is torch.int16", None, None, None, None, table.short()),
            wrong("same last dimension", None, cache[..., :7]),
            wrong("must have the same sizes in all", None, None, cache[:, :, :4]),
            wrong("query has 3 heads, not a multiple of the 2 heads", query[:, :3]),
            wrong("query has 4 heads, not a multiple of the 0", None, cache[:, :0], cache[:, :0]),
            wrong(r"cache_lengths has shape \(3,\).*\(2,\)", None, None, None, lengths_of(1, 1, 1)),
            wrong(r"cache_lengths has shape \(2, 1\)", None, None, None, lengths[:, None]),
            wrong("holds 1 sequences, fewer than the 2", None, cache[:1], cache[:1]),
            wrong(r"block_table has shape \(3,\)", None, None, None, None, table[0]),
            wrong(r"block_table has shape \(1, 3\)", None, None, None, None, table[:1]),
            wrong("at least one key", None, cache[:, :, :0], cache[:, :, :0], None, table),
            *(
                ErrorSample((query, cache, cache, lengths), {name: value}, match=match)
                for name, value, match in (
                    ("window_left", -2, "decode_attention: window_left is -2"),
                    ("softcap", -1.0, "decode_attention: softcap is -1"),
                    ("alibi_slopes", torch.ones(3), r"alibi_slopes has shape \(3,\).*\(4,\)"),
                )
            ),
        ]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_the_window_hides_is_not_read(
    dtype: torch.dtype, rows: int, device: torch.device
) -> None:
    """Keys before all windows may be NaN, and their pages may be none."""
    query, key, value, lengths, table, _ = paged((700, 40), 8, (4, 2), rows).converted(dtype).args
    inputs = [each.to(device) for each in (query, key, value, lengths, table)]
    expected = decode_attention(*inputs, window_left=20)
    for b, length in enumerate(lengths.tolist()):
        table[b, : (length - rows - 20) // 8] = 2**30
    inputs[4] = table.to(device)
    assert torch.equal(decode_attention(*inputs, window_left=20), expected)
    keys, values = torch.full((2, 2, 2, 700, 8), torch.nan, dtype=dtype)
    keys[:, :, 600:], values[:, :, 600:] = normal(2, 2, 100, 8), normal(2, 2, 100, 8, seed=1)
    contiguous = [each.to(device) for each in (query, keys, values, lengths_of(700, 690))]
    assert decode_attention(*contiguous, window_left=50).isfinite().all()


def test_lengths_out_of_range_are_refused() -> None:
    query, cache = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 5, 4)
    table = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"cache_lengths\[1\] is 6; .* between 0 and 5"):
        decode_attention(query, cache, cache, lengths_of(5, 6))
    with pytest.raises(RuntimeError, match=r"cache_lengths\[0\] is -1; .* between 0 and 5"):
        decode_attention(query, cache, cache, lengths_of(-1, 5))
    with pytest.raises(RuntimeError, match=r"cache_lengths\[1\] is 11; .* between 0 and 10"):
        decode_attention(query, cache, cache, lengths_of(10, 11), table)


@pytest.mark.parametrize("page", [-1, 2, 2**31 - 1])
def test_pages_out_of_range_are_refused(page: int) -> None:
    query, cache = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 5, 4)
    table = torch.tensor([[0, 1], [1, page]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"block_table\[1, 1\] is {page}; .* 0 and 1, since"):
        decode_attention(query, cache, cache, lengths_of(6, 6), table)
    # It is not needed for five keys.
    assert (decode_attention(query, cache, cache, lengths_of(6, 5), table) == 1).all()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_what_a_row_does_not_see_may_be_nan(
    dtype: torch.dtype, rows: int, device: torch.device
) -> None:
    """Beyond the length, on other pages, and for the first rows the last rows' own keys."""
    for lengths in ((150, 67, 2, 0), (700, 1, 300, 5)):
        clean = call(lengths, (4, 2), rows, sizes=(24, 40)).converted(dtype)
        query, key, value, _ = clean.args
        expected = decode_attention(*clean.map_tensors(lambda t: t.to(device)).args).cpu()
        key, value = key.clone(), value.clone()
        for b, length in enumerate(lengths):
            key[b, :, length:] = value[b, :, length:] = torch.nan
        spoilt = [each.to(device) for each in (query, key, value, clean.args[3])]
        assert torch.equal(decode_attention(*spoilt).cpu(), expected)
        # The first row sees none of the keys of the others.
        for b, length in enumerate(lengths):
            key[b, :, max(length - rows + 1, 0) :] = torch.inf
            value[b, :, max(length - rows + 1, 0) :] = torch.nan
        spoilt = [each.to(device) for each in (query, key, value, clean.args[3])]
        first = decode_attention(*spoilt).cpu()[:, :, 0]
        assert torch.equal(first, expected[:, :, 0])


def test_a_page_that_is_not_needed_may_be_nan(device: torch.device) -> None:
    sample = paged((33, 7), 4, (4, 2), 2, (16, 16), table_pages=11).converted(torch.float32)
    query, key, value, lengths, table, _ = sample.args
    needed = {int(page) for row, count in ((0, 9), (1, 2)) for page in table[row, :count]}
    expected = references.decode_attention(query, key, value, lengths, table)
    key, value = key.clone(), value.clone()
    for page in range(len(key)):
        if page not in needed:
            key[page] = value[page] = torch.nan
    table = table.clone()
    table[1, 2:] = 2**30
    arguments = [each.to(device) for each in (query, key, value, lengths, table)]
    torch.testing.assert_close(decode_attention(*arguments).cpu(), expected)


def test_nan_and_infinity_reach_their_own_sequence(device: torch.device) -> None:
    for dtype in FLOATING:
        key, value = torch.ones(3, 2, 70, 9), torch.ones(3, 2, 70, 5)
        key[1, 0, 68, 3] = torch.nan
        value[2, 1, 3, 4] = torch.inf
        query = torch.ones(3, 4, 1, 9)
        tensors = [each.to(device, dtype) for each in (query, key, value)]
        result = decode_attention(*tensors, lengths_of(70, 70, 70).to(device)).cpu().float()
        expected = torch.ones(3, 4, 1, 5)
        expected[1, :2] = torch.nan
        expected[2, 2:, :, 4] = torch.inf
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_a_contiguous_and_a_paged_cache_give_the_same(device: torch.device) -> None:
    sample = call((512, 100, 77), (4, 2), 2, 512, (32, 32)).converted(torch.float32)
    query, key, value, lengths = (each.to(device) for each in sample.args)
    table = torch.arange(3 * 32, device=device).view(3, 32)
    pages = [
        cache.unflatten(2, (32, 16)).transpose(1, 2).flatten(0, 1).contiguous()
        for cache in (key, value)
    ]
    expected = decode_attention(query, key, value, lengths)
    assert torch.equal(decode_attention(query, *pages, lengths, table), expected)
    # flash-attn's order of dimensions, read in place.
    inside = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (key, value)]
    assert torch.equal(decode_attention(query, *inside, lengths), expected)
    half = decode_attention(query, key, value, lengths, scale=0.5)
    checked(Sample((*(each.cpu() for each in (query, key, value, lengths)), None, 0.5)), device)
    assert not torch.equal(half, expected)


@pytest.mark.parametrize("dtype", FLOATING)
def test_one_long_sequence_among_many(dtype: torch.dtype, device: torch.device) -> None:
    lengths = (*(3 * b for b in range(30)), 4000)
    checked(call(lengths, (4, 1), 1, sizes=(64, 64)).converted(dtype), device)


def test_agrees_with_attention(device: torch.device) -> None:
    """On its own ground: every key valid, one row, or causal from the first key on."""
    sample = call((400, 400), (8, 2), 1, sizes=(64, 48)).converted(torch.float32)
    query, key, value, lengths = (each.to(device) for each in sample.args)
    expected = pkg.ops.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(decode_attention(query, key, value, lengths), expected)
    query = normal(2, 8, 6, 64).float().to(device)
    expected = pkg.ops.scaled_dot_product_attention(
        query, key[:, :, :6], value[:, :, :6], is_causal=True, enable_gqa=True
    )
    result = decode_attention(query, key, value, lengths_of(6, 6).to(device))
    torch.testing.assert_close(result, expected)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    sample = call((3000, 17), (6, 2), 2, sizes=(64, 64)).converted(torch.bfloat16)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(decode_attention(*sample.args))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_gradient_is_refused(device: torch.device) -> None:
    sample = call((4, 3)).converted(torch.float32).map_tensors(lambda t: t.to(device))
    query, *rest = sample.args
    recording = query.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="decode_attention: an argument requires grad"):
        decode_attention(recording, *rest)
    with pytest.raises(RuntimeError, match="decode_attention: an argument requires grad"):
        torch.func.grad(lambda q: decode_attention(q, *rest).sum())(query)
    with torch.no_grad():
        assert torch.equal(decode_attention(recording, *rest), decode_attention(query, *rest))


@pytest.mark.tracing
def test_a_gradient_is_refused_under_compilation() -> None:
    query, *rest = call((4, 3)).converted(torch.float32).args
    compiled = torch.compile(decode_attention, fullgraph=True)
    with pytest.raises(RuntimeError, match="this operator is for inference alone"):
        compiled(query.clone().requires_grad_(), *rest)
    assert torch.equal(compiled(query, *rest), decode_attention(query, *rest))


def test_vmap_over_sequences_that_share_their_pages() -> None:
    query, key, value, lengths, table, _ = paged((9, 4, 7, 1), 3, rows=2).args
    expected = decode_attention(query, key, value, lengths, table)

    def one(query: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        output = decode_attention(query[None], key, value, lengths[None], table[None])
        return output[0]

    assert torch.equal(torch.func.vmap(one)(query, lengths, table), expected)
