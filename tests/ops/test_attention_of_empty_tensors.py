"""Both operators of attention where dimensions are zero: result, first and second derivatives.

Held to PyTorch's math backend, of packed sequences to a loop over them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import references
import torch
from derivatives import derivatives
from samples import normal
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pkg

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_zero")

Shape = tuple[int, ...]
# Head size of query and key, and of value.
HEAD_SIZES = ((0, 4), (4, 0), (0, 0), (4, 6))
LENGTHS = ((3, 5), (0, 5), (3, 0), (0, 0))


def math_attention(*tensors: Tensor | None, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def normal_like(tensor: Tensor, seed: int) -> Tensor:
    return normal(*tensor.shape, seed=seed).to(tensor)


results_of = partial(derivatives, draw=normal_like, may_leave_out=True)


def check(
    ours: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    shapes = [tuple(tensor.shape) for tensor in inputs]
    results = zip(results_of(ours, inputs), results_of(expected, inputs), strict=True)
    for index, (result, wanted) in enumerate(results):
        torch.testing.assert_close(
            result, wanted, msg=lambda text, at=(index, shapes): f"result {at}: {text}"
        )


def operands(*shapes: Shape, device: torch.device) -> list[Tensor]:
    return [normal(*shape, seed=seed).to(device) for seed, shape in enumerate(shapes)]


def masks(device: torch.device, *scores: int) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """Masks of numbers, which have gradients, and other ways to hide keys."""
    rows, columns = scores[-2:]
    yield [], {}
    yield [], {"scale": 0.3}
    yield [], {"is_causal": True}
    # A row that sees no key is not what is tested here: the first is seen by all.
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(1)
    yield [], {"attn_mask": seen}
    yield [], {"attn_mask": seen.expand(scores)}
    yield [normal(rows, columns, seed=7).to(device)], {}
    yield [normal(*scores, seed=8).to(device)], {}
    yield [normal(1, columns, seed=9).to(device)], {}


def check_dense(
    device: torch.device,
    shapes: Sequence[Shape],
    expected: Callable[..., Tensor] = math_attention,
    **options: Any,
) -> None:
    query, key, value = shapes
    inputs = operands(query, key, value, device=device)
    lead = torch.broadcast_shapes(query[:-2], () if options else key[:-2])
    for mask, more in masks(device, *lead, query[-2], key[-2]):

        def ours(*given: Tensor, more: Any = more) -> Tensor:
            return pkg.ops.scaled_dot_product_attention(*given, **more, **options)

        def plain(*given: Tensor, more: Any = more) -> Tensor:
            return expected(*given, **more, **options)

        check(ours, plain, [*inputs, *mask])


@pytest.mark.parametrize("head_sizes", HEAD_SIZES)
def test_without_head_size_or_length(device: torch.device, head_sizes: tuple[int, int]) -> None:
    head_size, value_size = head_sizes
    for lead, (rows, columns) in product(((), (2,), (2, 3)), LENGTHS):
        shapes = ((rows, head_size), (columns, head_size), (columns, value_size))
        check_dense(device, [(*lead, *shape) for shape in shapes])


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0), (0, 0), (2, 0, 3)])
def test_without_batch_or_heads(device: torch.device, lead: Shape) -> None:
    for (head_size, value_size), (rows, columns) in product(HEAD_SIZES, LENGTHS):
        shapes = ((rows, head_size), (columns, head_size), (columns, value_size))
        check_dense(device, [(*lead, *shape) for shape in shapes])


@pytest.mark.parametrize("of_query", [True, False])
def test_broadcast_to_an_empty_batch(device: torch.device, of_query: bool) -> None:
    """The operands that are there get gradients of zeros.

    Held to the definition: PyTorch's function leaves the batch of the query where a key is empty.
    """
    query, key = ((0, 2, 3, 4), (1, 2, 5, 4)) if of_query else ((1, 2, 3, 4), (0, 2, 5, 4))
    shapes = [query, key, (*key[:-1], 6)]
    check_dense(device, shapes, references.scaled_dot_product_attention)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (0, 2), (0, 1), (0, 0), (3, 3)])
def test_grouped_heads(device: torch.device, heads: tuple[int, int]) -> None:
    for batch, sizes, (rows, columns) in product((0, 2), HEAD_SIZES, LENGTHS):
        query = (batch, heads[0], rows, sizes[0])
        key, value = ((batch, heads[1], columns, size) for size in sizes)
        check_dense(device, (query, key, value), enable_gqa=True)


@pytest.mark.parametrize("sizes", HEAD_SIZES)
@pytest.mark.parametrize("dropout_p", [0.4, 1.0])
def test_dropout(device: torch.device, dropout_p: float, sizes: tuple[int, int]) -> None:
    for rows, columns in LENGTHS:
        shapes = ((rows, sizes[0]), (columns, sizes[0]), (columns, sizes[1]))
        inputs = operands(*((2, 3, *shape) for shape in shapes), device=device)
        torch.manual_seed(5)
        seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)
        kept = torch.ops.pkg.attention_dropout_mask(seed, 6, rows, columns, dropout_p)

        def ours(*given: Tensor) -> Tensor:
            torch.manual_seed(5)
            return pkg.ops.scaled_dot_product_attention(*given, dropout_p=dropout_p)

        reference = partial(
            references.scaled_dot_product_attention,
            dropout_p=dropout_p,
            kept=kept.unflatten(0, (2, 3)),
        )
        check(ours, reference, inputs)


Lengths = tuple[int, ...]
SEQUENCES: list[tuple[Lengths, Lengths]] = [
    ((), ()),
    ((0,), (0,)),
    ((0, 0), (3, 0)),
    ((3, 0), (0, 0)),
    ((3, 0, 2), (0, 4, 2)),
    ((2, 3), (4, 3)),
]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (0, 2), (0, 0)])
@pytest.mark.parametrize("sizes", HEAD_SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(
    device: torch.device, causal: bool, sizes: tuple[int, int], heads: tuple[int, int]
) -> None:
    for rows, columns in SEQUENCES:
        edges = [[0, *accumulate(lengths)] for lengths in (rows, columns)]
        starts, ends = (torch.tensor(each, device=device) for each in edges)
        longest = max(rows, default=0), max(columns, default=0)
        shapes = (
            (sum(rows), heads[0], sizes[0]),
            (sum(columns), heads[1], sizes[0]),
            (sum(columns), heads[1], sizes[1]),
        )

        def ours(*given: Tensor, rest: Any = (starts, ends, *longest)) -> Tensor:
            return pkg.ops.scaled_dot_product_attention_varlen(*given, *rest, causal=causal)

        def looped(*given: Tensor, edges: Any = edges) -> Tensor:
            query, key, value = given
            # A batch without a sequence has a gradient too.
            outputs = [query.sum() * query.new_zeros(0, query.shape[1], value.shape[2])]
            for (first, last), (begin, end) in zip(*map(pairwise, edges), strict=True):
                sides = (query[first:last], key[begin:end], value[begin:end])
                mask = torch.ones(last - first, end - begin, dtype=torch.bool, device=query.device)
                mask = mask.tril(end - begin - last + first) if causal else mask
                attended = math_attention(
                    *(side.transpose(0, 1)[None] for side in sides), mask, enable_gqa=True
                )
                outputs.append(attended[0].transpose(0, 1))
            return torch.cat(outputs)

        check(ours, looped, operands(*shapes, device=device))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (0, 2), (0, 0)])
@pytest.mark.parametrize("sizes", HEAD_SIZES)
def test_dropout_in_packed_sequences(
    device: torch.device, sizes: tuple[int, int], heads: tuple[int, int]
) -> None:
    """All of it dropped: zeros of each shape."""
    for rows, columns in SEQUENCES:
        starts, ends = (
            torch.tensor([0, *accumulate(lengths)], device=device) for lengths in (rows, columns)
        )
        longest = max(rows, default=0), max(columns, default=0)
        shapes = (
            (sum(rows), heads[0], sizes[0]),
            (sum(columns), heads[1], sizes[0]),
            (sum(columns), heads[1], sizes[1]),
        )

        def ours(*given: Tensor, rest: Any = (starts, ends, *longest)) -> Tensor:
            return pkg.ops.scaled_dot_product_attention_varlen(*given, *rest, 1.0)

        output = (sum(rows), heads[0], sizes[1])
        results = results_of(ours, operands(*shapes, device=device))
        expected = [output, *shapes, *shapes, output]
        for result, shape in zip(results, expected, strict=True):
            assert result.shape == shape
            assert (result == 0).all()
