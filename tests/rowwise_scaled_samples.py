"""What the tests of rowwise_scaled_linear_s8s4 and rowwise_scaled_linear_s4s4 share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from samples import around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample


def integers(*shape: int, least: int, most: int, seed: int = 0) -> Tensor:
    """Of every value between the bounds, the bounds themselves often."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) & 0xFFFFFFFF)
    values = torch.randint(least, most + 1, shape, generator=generator)
    ends = torch.randint(0, 4, shape, generator=generator)
    return torch.where(ends == 0, least, torch.where(ends == 1, most, values)).to(torch.int8)


def reference(
    values: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """On ``values`` that are not packed: exact sums, then float32, or float64 where anything is.

    Sums of so few products are exact in float64, which CUDA multiplies, as it does not int64.
    """
    sums = values.double() @ pkg.ops.unpack_int4(weight).double().mT
    floating = [input_scale, weight_scale, *([] if bias is None else [bias])]
    dtype = out_dtype or input_scale.dtype
    is_wide = torch.float64 in (dtype, *(each.dtype for each in floating))
    wide = torch.float64 if is_wide else torch.float32
    result = sums.to(wide) * input_scale.to(wide).unsqueeze(-1) * weight_scale.to(wide).flatten()
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(dtype)


def call(
    lead: tuple[int, ...],
    inner: int,
    columns: int,
    is_packed: bool,
    with_bias: bool = True,
    out_dtype: torch.dtype | None = None,
    **options: object,
) -> Sample:
    """A call whose rows are int4 where ``is_packed``, int8 where not."""
    least, most = (-8, 7) if is_packed else (-128, 127)
    values = integers(*lead, inner, least=least, most=most)
    weight = pkg.ops.pack_int4(integers(columns, inner, least=-8, most=7, seed=1))
    return Sample(
        (
            pkg.ops.pack_int4(values) if is_packed else values,
            normal(*lead, seed=2),
            weight,
            normal(columns, seed=3),
            normal(columns, seed=4) if with_bias else None,
            out_dtype,
        ),
        **options,
    )


def samples(is_packed: bool) -> list[Sample]:
    """Every kind of call, and sizes around the widths of all tiles."""
    # Not float64, whose error the tolerance has no wider type to measure in.
    floats = [torch.float32, torch.float16, torch.bfloat16]
    result = [
        call((3,), 6, 4, is_packed, with_bias=False),
        call((), 6, 4, is_packed),
        call((2, 3), 6, 4, is_packed),
        call((2, 1, 3), 10, 5, is_packed),
        call((0,), 6, 4, is_packed),
        call((3,), 0, 4, is_packed),
        call((3,), 6, 0, is_packed),
        *(call((3,), 6, 4, is_packed, out_dtype=dtype) for dtype in floats),
    ]
    # Scales of a weight as a reduction of its rows may leave them.
    for shape in ((4, 1), (1, 4)):
        sample = call((3,), 6, 4, is_packed)
        input, row, weight, column, *rest = sample.args
        result.append(Sample((input, row, weight, column.view(shape), *rest)))
    for columns in (0, 1):
        sample = call((3,), 6, columns, is_packed)
        input, row, weight, column, *rest = sample.args
        for shape in ((columns, 1), (1, columns)):
            result.append(Sample((input, row, weight, column.view(shape), *rest), values_only=True))
    for rows, inner in ((3, 4), (7, 6), (20, 18)):
        result.append(call((rows,), inner, 33, is_packed, family="rows"))
    sizes = around(4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
    for size in sizes:
        even = 2 * size
        for rows, inner, columns in ((size, 8, 5), (5, even, 7), (13, even, 7), (7, 6, size)):
            result.append(call((rows,), inner, columns, is_packed, values_only=True))
        result.append(call((20,), 10, size, is_packed, values_only=True))
        result.append(call((1,), even, size, is_packed, values_only=True))
    # Longer than a panel of the inner dimension, and more rows than a panel serves at once.
    result.append(call((14,), 4096 + 130, 35, is_packed, values_only=True))
    result.append(call((490,), 66, 33, is_packed, values_only=True))
    return result


def errors(is_packed: bool) -> list[ErrorSample]:
    """Calls of a 2 x 4 input and a 3 x 4 weight with one thing wrong."""
    rows = torch.ones(2, 2 if is_packed else 4, dtype=torch.int8)
    weight = torch.ones(3, 2, dtype=torch.int8)
    row, column = torch.ones(2), torch.ones(3)
    wrong = [
        ErrorSample(
            (rows.float(), row, weight, column), match="input is torch.float32; it must be"
        ),
        ErrorSample((rows.short(), row, weight, column), match="input is torch.int16; it must be"),
        ErrorSample((rows[0, 0], row[0], weight, column), match="input has no dimensions"),
        ErrorSample((rows, row, weight.int(), column), match=r"weight is torch.int32.*pack_int4"),
        ErrorSample((rows, row, weight[0], column), match=r"weight has shape \(2,\)"),
        ErrorSample(
            (rows, row, torch.ones(3, 3, dtype=torch.int8), column),
            match=r"do not match: a row of input has 4 values.* must have 2 bytes",
        ),
        ErrorSample((rows, row.int(), weight, column), match="input_scale is torch.int32"),
        ErrorSample((rows, row[:, None], weight, column), match=r"shape \(2, 1\).*shape \(2,\)"),
        ErrorSample((rows, column, weight, column), match=r"input_scale has shape \(3,\)"),
        ErrorSample((rows, row, weight, row), match=r"weight_scale has shape \(2,\).*\(3,\)"),
        ErrorSample(
            (rows, row, weight, torch.ones(3, 3)), match=r"\(3, 3\).*\(3,\), \(3, 1\) or \(1, 3\)"
        ),
        ErrorSample(
            (rows, row, weight, torch.ones(1, 2)), match=r"weight_scale has shape \(1, 2\)"
        ),
        ErrorSample((rows, row, weight, column.view(1, 3, 1)), match=r"shape \(1, 3, 1\) but"),
        ErrorSample((rows, row, weight, column[0]), match=r"weight_scale has shape \(\)"),
        ErrorSample((rows, row, weight, column.int()), match="weight_scale is torch.int32"),
        ErrorSample((rows, row, weight, column, row), match=r"bias has shape \(2,\)"),
        ErrorSample((rows, row, weight, column, column.long()), match="bias is torch.int64"),
        ErrorSample(
            (rows, row, weight, column, None, torch.int32), match="out_dtype is torch.int32"
        ),
    ]
    longest = 2**31 // (64 if is_packed else 1024)
    long_row = torch.ones(1, 1, dtype=torch.int8).expand(1, longest // 2 if is_packed else longest)
    long_weight = torch.ones(1, 1, dtype=torch.int8).expand(1, longest // 2)
    wrong.append(
        ErrorSample(
            (long_row, row[:1], long_weight, column[:1]),
            match=f"has {longest} values; sums are exact in int32 up to {longest - 2}",
        )
    )
    return wrong


def assert_zeros_have_the_signs_of_their_scales(
    op: Callable[..., Tensor], is_packed: bool, device: torch.device
) -> None:
    """A sum of zero times a negative scale is -0, unless a bias of +0 is added to it.

    Of sizes that CUTLASS's kernel takes, where it is built in, and of others.
    """
    for rows, inner, columns in ((32, 64, 16), (3, 10, 5)):
        values = torch.zeros(rows, inner, dtype=torch.int8, device=device)
        weight = pkg.ops.pack_int4(torch.ones(columns, inner, dtype=torch.int8, device=device))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            scale = torch.ones(rows, dtype=dtype, device=device)
            scale[::2] = -1
            factors = torch.ones(columns, dtype=dtype, device=device)
            operands = (pkg.ops.pack_int4(values) if is_packed else values, scale, weight, factors)
            is_negative = (scale < 0).unsqueeze(-1).expand(rows, columns)
            for bias, expected in (
                (None, is_negative),
                (torch.zeros_like(factors), torch.zeros_like(is_negative)),
                (-torch.zeros_like(factors), is_negative),
            ):
                result = op(*operands, bias)
                assert (result == 0).all()
                assert torch.equal(result.signbit(), expected)


def rows_near_ties(rows: int, inner: int, bits: int, exponents: int = 50) -> Tensor:
    """float32 rows of any magnitude whose quotients lie within a few units of a whole and a half.

    There a quotient that is not rounded as a division rounds it becomes another integer.
    """
    generator = torch.Generator().manual_seed(0)
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    largest = torch.exp2((torch.rand(rows, 1, generator=generator) * 2 - 1) * exponents)
    steps = torch.randint(least, most, (rows, inner), generator=generator) + 0.5
    values = steps * (largest / abs(least))
    off = torch.randint(-3, 4, values.shape, generator=generator, dtype=torch.int32)
    values = (values.view(torch.int32) + off).view(torch.float32)
    values = values.clamp(-largest, largest)
    values[:, :1] = -largest
    return values
