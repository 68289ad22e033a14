"""The kernels of decode_attention, run on the CPU by the emulator, against the plain reference."""

from __future__ import annotations

import pytest
import references
import torch
from emulator import Argument, Emulator
from operator_collection import operator_classes
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indices(name: str, tensor: Tensor | None) -> dict[str, Argument]:
    if tensor is None:
        return {}
    return {name: tensor, f"{name}_strides": tensor.stride(), f"{name}_type": name_of(tensor.dtype)}


def emulated(emulator: Emulator, sample: Sample, splits: int = 1, blocks: int = 3) -> Tensor:
    """What the kernels make of a call when each sequence is split in so many parts."""
    defaults = (None, None, -1, 0.0, None)
    given = (*sample.args, *defaults[len(sample.args) - 4 :])
    query, key, value, lengths, table, scale, window, softcap, slopes = given
    batch, heads, rows, head_size = query.shape
    key_heads, keys, value_size = value.shape[1:]
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    parts = batch * heads * rows * splits
    output = torch.full((batch, heads, rows, value_size), 77, dtype=query.dtype)
    states = torch.full((parts, 2), 77, dtype=accumulator)
    sums = torch.full((parts, value_size), 77, dtype=accumulator)
    arguments: dict[str, Argument] = {
        "type": name_of(query.dtype),
        "batch": batch,
        "key_heads": key_heads,
        "group": heads // key_heads,
        "rows": rows,
        "head_size": head_size,
        "value_size": value_size,
        "capacity": keys if table is None else table.shape[1] * keys,
        "page_size": 0 if table is None else keys,
        "pages": len(key),
        "splits": splits,
        "scale": float(max(head_size, 1) ** -0.5 if scale is None else scale),
        "window": window,
        "softcap": float(softcap),
    }
    if slopes is not None:
        arguments["slopes"] = slopes
        arguments["slopes_type"] = name_of(slopes.dtype)
        arguments["slopes_strides"] = (0, *slopes.stride())[-2:]
    operands = {"query": query, "key": key, "value": value, "output": output}
    for name, tensor in operands.items():
        arguments |= {name: tensor, f"{name}_strides": tensor.stride()}
    arguments |= indices("lengths", lengths) | indices("table", table)
    arguments |= {"states": states, "sums": sums}
    if splits == 1:
        emulator.run("decode_attention", ["output"], blocks, **arguments)
    else:
        emulator.run("decode_attention", ["states", "sums"], blocks, **arguments)
        emulator.run("decode_attention_combine", ["output"], blocks, **arguments)
    return output


def check(emulator: Emulator, sample: Sample, splits: int = 1) -> None:
    (expected,) = expect(lambda each: [references.decode_attention(*each.args)], sample)
    expected.compare(emulated(emulator, sample, splits), str(sample))


def make(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (2, 1),
    rows: int = 1,
    sizes: tuple[int, int] = (8, 8),
    page_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sample:
    """Sequences of these lengths, with room for one key more."""
    batch, keys = len(lengths), max(lengths) + 1
    table = None
    caches = (batch, heads[1], keys)
    if page_size is not None:
        needed = -(-keys // page_size)
        caches = (batch * needed, heads[1], page_size)
        table = torch.randperm(batch * needed).view(batch, needed)
    query = torch.randn(batch, heads[0], rows, sizes[0], dtype=torch.float64)
    key, value = (torch.randn(*caches, size, dtype=torch.float64) for size in sizes)
    tensors = [each.to(dtype) for each in (query, key, value)]
    return Sample((*tensors, torch.tensor(lengths, dtype=torch.int32), table))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_every_tile(
    cuda_emulator: Emulator, dtype: torch.dtype, splits: int
) -> None:
    for lengths in ((1, 63, 0), (64, 65), (127, 128, 129), (200, 3)):
        check(cuda_emulator, make(lengths, dtype=dtype), splits)
        check(cuda_emulator, make(lengths, (1, 1), dtype=dtype), splits)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (7, 65), (8, 64), (63, 63), (64, 128), (65, 3), (129, 129), (200, 260)]
)
def test_head_sizes_around_every_slice_and_tile(
    cuda_emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    check(cuda_emulator, make((70, 9), sizes=sizes, dtype=dtype))
    check(cuda_emulator, make((70, 9), (1, 1), sizes=sizes, dtype=dtype), 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (8, 1)])
def test_rows_and_groups(cuda_emulator: Emulator, rows: int, heads: tuple[int, int]) -> None:
    check(cuda_emulator, make((80, rows, rows - 1, 0), heads, rows), 2)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 100])
def test_pages(cuda_emulator: Emulator, page_size: int) -> None:
    check(cuda_emulator, make((130, 0, 71), (4, 2), 2, page_size=page_size), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("window", [0, 3, 64, 100, 500])
def test_windows_caps_and_slopes(cuda_emulator: Emulator, dtype: torch.dtype, window: int) -> None:
    plain = make((300, 3, 130), (4, 2), 2, dtype=dtype)
    check(cuda_emulator, Sample((*plain.args[:4], None, None, window)), 3)
    slopes = torch.rand(3, 4)
    check(cuda_emulator, Sample((*plain.args[:4], None, None, window, 1.5, slopes)))
    in_pages = make((300, 3, 130), (4, 2), 3, page_size=16, dtype=dtype)
    options = (None, window, 0.0, slopes[0].to(dtype))
    check(cuda_emulator, Sample((*in_pages.args, *options)), 2)


def test_strides(cuda_emulator: Emulator) -> None:
    sample = make((70, 66), (4, 2), 3, (16, 24))
    query, key, value, lengths, _ = sample.args
    inside = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)]
    check(cuda_emulator, Sample((*inside, lengths)))
    apart = [each.mT.contiguous().mT for each in (query, key, value)]
    lengths = torch.stack([lengths, lengths * 0], 1)[:, 0]
    check(cuda_emulator, Sample((*apart, lengths.long())), 2)


@pytest.mark.parametrize("splits", [1, 2])
def test_what_is_not_seen_may_be_nan(cuda_emulator: Emulator, splits: int) -> None:
    sample = make((100, 3), (4, 2), 3, (16, 24))
    expected = emulated(cuda_emulator, sample, splits)
    _, key, value, lengths, _ = sample.args
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length:] = value[b, :, length:] = torch.nan
    assert torch.equal(emulated(cuda_emulator, sample, splits), expected)
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length - 2 :] = torch.inf
        value[b, :, length - 2 :] = torch.nan
    assert torch.equal(emulated(cuda_emulator, sample, splits)[:, :, 0], expected[:, :, 0])


def test_what_is_out_of_range_is_never_read(cuda_emulator: Emulator) -> None:
    """The sanitizer watches: lengths are cut, and keys on pages that do not exist left out."""
    query, key, value, lengths, _ = make((9, 9, 9)).args
    cut = torch.tensor([2**31 - 1, -5, 10], dtype=torch.int32)
    full = torch.tensor([10, 0, 10], dtype=torch.int32)
    result = emulated(cuda_emulator, Sample((query, key, value, cut)), 2)
    assert torch.equal(result, emulated(cuda_emulator, Sample((query, key, value, full)), 2))

    pages = [
        cache[:, :, :9].unflatten(2, (3, 3)).transpose(1, 2).flatten(0, 1) for cache in (key, value)
    ]
    table = torch.arange(9).view(3, 3)
    table[1, 1], table[2, 2] = -1, 2**40
    result = emulated(cuda_emulator, Sample((query, *pages, lengths, table)))
    kept = [[0, 1, 2], [0, 2], [0, 1]]
    for b, pieces in enumerate(kept):
        one = [torch.cat([each[3 * b + page] for page in pieces], 1)[None] for each in pages]
        length = torch.tensor([3 * len(pieces)])
        exact = references.decode_attention(query[b : b + 1], *one, length)
        torch.testing.assert_close(result[b : b + 1], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_operator(emulated_operators: torch._ops._OpNamespace, dtype: torch.dtype) -> None:
    """The host code too, on the samples of the CPU's operator; strides are the CPU's own."""
    for sample in operator_classes()["decode_attention"]().samples():
        sample = sample.converted(dtype)
        (expected,) = expect(lambda each: [references.decode_attention(*each.args)], sample)
        result = emulated_operators.decode_attention(*sample.args)
        expected.compare(result, str(sample))
        assert result.stride() == torch.ops.pkg.decode_attention(*sample.args).stride()
