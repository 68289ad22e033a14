"""NaN and infinity in attention come out where PyTorch's math backend has them.

That one adds -inf to the scores of hidden keys, and multiplies every value by its probability, also
by zero: a NaN among the keys, or the values, reaches every row, whatever a mask hides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import FLOATING, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pkg

SIZE = 16
# Rows and keys: in one strip, in several blocks, and few rows against many keys.
SHAPES = [(30, 40), (300, 500), (2, 1000)]
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value", "of mask")


def math(*inputs: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*inputs, **options)


def results(
    attention: Callable[..., Tensor],
    tensors: dict[str, Tensor],
    mask: Tensor | None,
    is_causal: bool,
) -> list[Tensor]:
    leaves = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
    wanted = list(leaves)
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().requires_grad_()
        wanted.append(mask)
    output = attention(*leaves, attn_mask=mask, is_causal=is_causal)
    return [output.detach(), *torch.autograd.grad(output, wanted, tensors["gradient"])]


def masks(rows: int, keys: int, special: int) -> dict[str, Tensor | None]:
    """Of every kind; beside a special key that they hide or show."""
    hidden = normal(rows, keys, seed=5) < 0.5
    hidden[:, special] = False
    shown, mixed = hidden.clone(), hidden.clone()
    shown[:, special] = True
    mixed[::2, special] = True
    numbers = normal(rows, keys, seed=6)
    excluded = numbers.clone()
    excluded[:, special] = -torch.inf
    distance = torch.arange(rows)[:, None] - torch.arange(keys)
    return {
        "none": None,
        "causal": None,
        "hidden": hidden,
        "shown": shown,
        "hidden in every other row": mixed,
        "window": distance.abs() < 8,
        "numbers": numbers,
        "-inf": excluded,
    }


def compare(
    rows: int,
    keys: int,
    dtype: torch.dtype,
    where: str,
    special: float,
    kind: str,
    key_at: int | None = None,
) -> None:
    key_at, row_at = keys // 4 if key_at is None else key_at, rows // 2
    mask = masks(rows, keys, key_at)[kind]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    lengths = {"query": rows, "key": keys, "value": keys, "gradient": rows}
    tensors = {
        name: normal(1, 2, length, SIZE, seed=seed).to(dtype)
        for seed, (name, length) in enumerate(lengths.items())
    }
    if where == "mask":
        assert mask is not None
        mask[row_at, key_at] = special
    else:
        tensors[where][0, 0, key_at if lengths[where] == keys else row_at, 3] = special
    causal = kind == "causal"
    ours = results(pkg.ops.scaled_dot_product_attention, tensors, mask, causal)
    theirs = results(math, tensors, mask, causal)
    for name, one, other in zip(NAMES, ours, theirs, strict=False):
        for is_so in (torch.isnan, torch.isposinf, torch.isneginf):
            wrong = int((is_so(one) != is_so(other)).sum())
            assert wrong == 0, f"{name}: {is_so.__name__} differs in {wrong} of {one.numel()}"
        finite = other.isfinite()
        # Values beside a NaN; how exact they are is asked elsewhere.
        torch.testing.assert_close(
            one[finite], other[finite], rtol=0, atol=(torch.finfo(dtype).eps ** 0.5)
        )


SPECIAL = (torch.nan, torch.inf, -torch.inf)
# Every dtype for the smallest shape, one in each arithmetic for the others.
DTYPES = {SHAPES[0]: FLOATING, **dict.fromkeys(SHAPES[1:], (torch.float32, torch.bfloat16))}


# The kinds of masks without anything hidden, and the others.
SHOWING = ("none", "numbers")
HIDING = ("causal", "hidden", "shown", "hidden in every other row", "window", "-inf")


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *((where, kind) for where in ("query", "key", "value", "gradient") for kind in SHOWING),
        *(("mask", kind) for kind in ("numbers", "-inf")),
    ],
)
@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_where_nothing_is_hidden(rows: int, keys: int, where: str, kind: str) -> None:
    for dtype in DTYPES[rows, keys]:
        for special in SPECIAL:
            compare(rows, keys, dtype, where, special, kind)


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("where", ["query", "key", "value", "gradient"])
@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_where_keys_are_hidden(rows: int, keys: int, where: str, kind: str) -> None:
    for dtype in DTYPES[rows, keys]:
        for special in SPECIAL:
            compare(rows, keys, dtype, where, special, kind)


@pytest.mark.parametrize(
    ("where", "special"),
    [
        *((where, special) for where in ("query", "key") for special in (*SPECIAL, 1e30, -1e30)),
        *(("value", special) for special in SPECIAL),
    ],
)
def test_where_keys_of_a_later_block_have_it(where: str, special: float) -> None:
    # Whole blocks of keys after the first: their probabilities are made in another way.
    for dtype in (torch.float32, torch.bfloat16):
        compare(30, 768, dtype, where, special, "none", key_at=500)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("size", [12, 16, 128])
@pytest.mark.parametrize(("rows", "keys"), [*SHAPES, (30, 768)])
def test_large_scores(rows: int, keys: int, size: int, dtype: torch.dtype) -> None:
    # Beyond the digits of their number, where the scale has no short one: 1 / sqrt(12).
    for magnitude in (1e3, 1e4) if dtype == torch.float16 else (1e3, 1e5, 1e6, 1e15):
        query, key, value = (
            normal(1, 2, length, size, seed=seed).to(dtype) * (magnitude if seed < 2 else 1)
            for seed, length in enumerate((rows, keys, keys))
        )
        exact = (query.double() @ key.double().mT * size**-0.5).softmax(-1) @ value.double()
        for causal in (False, True):
            leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            output = pkg.ops.scaled_dot_product_attention(*leaves, is_causal=causal)
            assert output.isfinite().all()
            # In half precision, few rows sum their scores in another order than the gradients do.
            if rows > 8 or causal or dtype in (torch.float32, torch.float64):
                for gradient in torch.autograd.grad(output.sum(), leaves):
                    assert gradient.isfinite().all()
            if not causal:
                # One key has all the probability, seldom another one as much.
                close = torch.isclose(output.double(), exact, rtol=0, atol=0.05)
                assert close.double().mean() > 0.98


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize(("rows", "keys"), [*SHAPES, (1, 4096)])
def test_lowest_number_in_place_of_infinity(
    rows: int, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    # It swallows the scores: probabilities are equal where it hides every key of a row, as in
    # batches that are padded.
    query, key, value = (
        normal(1, 2, length, SIZE, seed=seed).to(dtype)
        for seed, length in enumerate((rows, keys, keys))
    )
    lowest = torch.finfo(mask_dtype).min
    mask = torch.zeros(rows, keys, dtype=mask_dtype)
    mask[: (rows + 1) // 2] = lowest
    mask[:, keys // 2 :] = lowest
    output = pkg.ops.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    seen = value.double()[..., : keys // 2, :]
    probabilities = (query.double() @ key.double()[..., : keys // 2, :].mT * SIZE**-0.5).softmax(-1)
    expected = probabilities @ seen
    expected[..., : (rows + 1) // 2, :] = value.double().mean(-2, keepdim=True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("number", [-1e25, None], ids=["-1e25", "the lowest"])
@pytest.mark.parametrize(("rows", "keys"), [*SHAPES, (1, 40)])
def test_gradients_of_rows_that_a_large_number_hides(
    device: torch.device, rows: int, keys: int, number: float | None, dtype: torch.dtype
) -> None:
    """Beside such a maximum nothing is left of the logarithm of a row's sum, which they need."""
    query, key, value, gradient = (
        normal(1, 2, length, SIZE, seed=seed).to(dtype)
        for seed, length in enumerate((rows, keys, keys, rows))
    )
    mask_dtype = torch.promote_types(dtype, torch.float32)
    lowest = torch.finfo(mask_dtype).min if number is None else number
    hidden = (rows + 1) // 2
    mask = torch.zeros(rows, keys, dtype=mask_dtype)
    mask[:hidden] = lowest
    mask[:, keys // 2 :] = lowest
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    scores = leaves[0] @ leaves[1].mT * SIZE**-0.5
    # The number swallows the scores: all keys have the same, which has their derivatives.
    same = scores[..., :hidden, :] - scores[..., :hidden, :].detach()
    seen = scores[..., hidden:, : keys // 2].softmax(-1)
    output = same.softmax(-1) @ leaves[2], seen @ leaves[2][..., : keys // 2, :]
    expected = torch.autograd.grad(torch.cat(output, -2), leaves, gradient.double())
    tensors = {"query": query, "key": key, "value": value, "gradient": gradient}
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    found = results(pkg.ops.scaled_dot_product_attention, tensors, mask.to(device), False)[1:4]
    for ours, exact in zip(found, expected, strict=True):
        bound = 16 * torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=0, atol=bound)
