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

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float64, torch.float32, *HALVES]
MOST_SHARED_BYTES = 227 * 1024  # that a block of an H200 may ask for
LEAST_SHARED_BYTES = 99 * 1024  # of compute capability 8.6, the least from 8.0 on


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indices(name: str, tensor: Tensor | None) -> dict[str, Argument]:
    if tensor is None:
        return {}
    return {name: tensor, f"{name}_strides": tensor.stride(), f"{name}_type": name_of(tensor.dtype)}


def emulated(
    emulator: Emulator,
    sample: Sample,
    splits: int = 1,
    blocks: int = 3,
    shared_bytes: int = MOST_SHARED_BYTES,
) -> Tensor:
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
        "most_shared_bytes": shared_bytes,
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


def check(
    emulator: Emulator, sample: Sample, splits: int = 1, shared_bytes: int = MOST_SHARED_BYTES
) -> None:
    (expected,) = expect(lambda each: [references.decode_attention(*each.args)], sample)
    expected.compare(emulated(emulator, sample, splits, 3, shared_bytes), str(sample))


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
    "sizes",
    [(1, 1), (7, 65), (8, 64), (63, 63), (64, 128), (65, 3), (129, 129), (200, 260), (260, 70)],
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


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=name_of)
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 100])
def test_pages(cuda_emulator: Emulator, dtype: torch.dtype, page_size: int) -> None:
    sample = make((130, 0, 71), (4, 2), 2, page_size=page_size, dtype=dtype)
    check(cuda_emulator, sample, 2)
    wide = Sample((*sample.args[:3], sample.args[3].long(), sample.args[4].int()))
    assert torch.equal(emulated(cuda_emulator, wide), emulated(cuda_emulator, sample))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_largest_window_hides_nothing(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Not where rows stand before the first key either, whose own keys are below zero."""
    for heads, rows in (((1, 1), 4), ((4, 2), 3)):
        plain = make((2, 130, 0), heads, rows, dtype=dtype)
        windowed = Sample((*plain.args, None, 2**63 - 1))
        assert torch.equal(emulated(cuda_emulator, windowed), emulated(cuda_emulator, plain))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_strides(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    sample = make((70, 66), (4, 2), 3, (16, 24), dtype=dtype)
    query, key, value, lengths, _ = sample.args
    inside = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)]
    check(cuda_emulator, Sample((*inside, lengths)))
    apart = [each.mT.contiguous().mT for each in (query, key, value)]
    lengths = torch.stack([lengths, lengths * 0], 1)[:, 0]
    check(cuda_emulator, Sample((*apart, lengths.long())), 2)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(
    "sizes",
    [(63, 65), (64, 64), (65, 127), (72, 200), (128, 128), (192, 193), (255, 257), (256, 256)],
)
def test_half_heads_around_every_slice_and_tile(
    cuda_emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Dense ones by asynchronous copies, also of lines that end within sixteen bytes."""
    sample = make((150, 9), (8, 1), sizes=sizes, dtype=dtype)
    check(cuda_emulator, sample)
    query, key, value, lengths, _ = sample.args
    padded = [torch.full((*each.shape[:3], 264), torch.nan).to(dtype) for each in (key, value)]
    for wide, cache in zip(padded, (key, value), strict=True):
        wide[..., : cache.shape[-1]] = cache
    dense = [wide[..., :size] for wide, size in zip(padded, sizes, strict=True)]
    same = Sample((query, *dense, lengths))
    assert torch.equal(emulated(cuda_emulator, same), emulated(cuda_emulator, sample))
    check(cuda_emulator, same, 2, LEAST_SHARED_BYTES)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("sizes", [(8, 8), (64, 128), (128, 72)])
def test_half_caches_of_any_alignment(
    cuda_emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """All give the same, however they are copied."""
    query, key, value, lengths, table = make(
        (130, 70), (4, 2), 2, sizes, page_size=16, dtype=dtype
    ).args
    expected = emulated(cuda_emulator, Sample((query, key, value, lengths, table)), 2)

    def misaligned(tensor: Tensor) -> Tensor:
        room = torch.full((tensor.numel() + 1,), torch.nan, dtype=dtype)
        return room[1:].view(tensor.shape).copy_(tensor)

    def inside(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    def apart(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT

    ways = (torch.clone, misaligned, inside, apart)
    for way_of_key, way_of_value in zip(ways, ways[1:] + ways[:1], strict=True):
        sample = Sample((way_of_value(query), way_of_key(key), way_of_value(value), lengths, table))
        assert torch.equal(emulated(cuda_emulator, sample, 2), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(
    ("heads", "rows"), [((8, 8), 1), ((8, 1), 1), ((16, 1), 1), ((17, 1), 1), ((6, 2), 7)]
)
def test_half_rows_around_the_tile(
    cuda_emulator: Emulator, dtype: torch.dtype, heads: tuple[int, int], rows: int
) -> None:
    lengths = (200, rows, rows - 1, 0)
    check(cuda_emulator, make(lengths, heads, rows, (64, 64), dtype=dtype))
    check(cuda_emulator, make(lengths, heads, rows, (128, 128), 16, dtype), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_grid_changes_nothing(cuda_emulator: Emulator, dtype: torch.dtype, splits: int) -> None:
    sample = make((300, 0, 77), (40, 2), 1, (64, 72), page_size=16, dtype=dtype)
    expected = emulated(cuda_emulator, sample, splits, blocks=1)
    for blocks in (2, 1000):
        assert torch.equal(emulated(cuda_emulator, sample, splits, blocks), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("window", [-1, 0, 20, 90])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_some_rows_see_reaches_them_alone(
    cuda_emulator: Emulator, dtype: torch.dtype, window: int, number: float
) -> None:
    """A value that is not finite, of each of the last keys, and of those at a window's edge."""
    lengths, rows = (150, 77), 5
    clean = make(lengths, (4, 2), rows, (64, 72), dtype=dtype)
    expected = emulated(cuda_emulator, Sample((*clean.args[:4], None, None, window)))
    for back in (1, 3, 5, 24, 95):
        query, key, value, *rest = (each for each in clean.args if each is not None)
        value = value.clone()
        for b, length in enumerate(lengths):
            if back <= length:
                value[b, 1, length - back, 3] = number
        sample = Sample((query, key, value, *rest, None, None, window))
        result = emulated(cuda_emulator, sample)
        for b, length in enumerate(lengths):
            for row in range(rows):
                own, at = length - rows + row, length - back
                sees = 0 <= at <= own and (window < 0 or at >= own - window)
                same = result[b, :, row].eq(expected[b, :, row])
                assert same[:2].all()
                assert same[2:, :3].all()
                assert same[2:, 4:].all()
                assert (result[b, 2:, row, 3].isfinite() == (not sees)).all()
        check(cuda_emulator, sample, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("splits", [1, 2])
def test_what_is_not_seen_may_be_nan(
    cuda_emulator: Emulator, dtype: torch.dtype, splits: int
) -> None:
    sample = make((100, 3), (4, 2), 3, (16, 24), dtype=dtype)
    expected = emulated(cuda_emulator, sample, splits)
    _, key, value, lengths, _ = sample.args
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length:] = value[b, :, length:] = torch.nan
    assert torch.equal(emulated(cuda_emulator, sample, splits), expected)
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length - 2 :] = torch.inf
        value[b, :, length - 2 :] = torch.nan
    assert torch.equal(emulated(cuda_emulator, sample, splits)[:, :, 0], expected[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=name_of)
def test_what_is_out_of_range_is_never_read(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """The sanitizer watches: lengths are cut, and keys on pages that do not exist left out."""
    query, key, value, lengths, _ = make((9, 9, 9), dtype=dtype).args
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
        alone = Sample((query[b : b + 1], *one, length))
        (expected,) = expect(lambda each: [references.decode_attention(*each.args)], alone)
        expected.compare(result[b : b + 1], f"sequence {b}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_operator(emulated_operators: torch._ops._OpNamespace, dtype: torch.dtype) -> None:
    """The host code too, on the samples of the CPU's operator; strides are the CPU's own."""
    for sample in operator_classes()["decode_attention"]().samples():
        sample = sample.converted(dtype)
        (expected,) = expect(lambda each: [references.decode_attention(*each.args)], sample)
        result = emulated_operators.decode_attention(*sample.args)
        expected.compare(result, str(sample))
        assert result.stride() == torch.ops.pkg.decode_attention(*sample.args).stride()
