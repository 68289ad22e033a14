"""The kernels of rowwise_scaled_linear and quantize_rowwise, run on the CPU by the emulator."""

from __future__ import annotations

import pytest
import rowwise_scaled_samples as shared
import torch
from emulator import Emulator
from samples import around
from test_emulated_matmul import FLOATS, name_of
from torch import Tensor

import pkg
from pkg.testing import Sample
from pkg.testing.tolerance import expect

TILE, DEPTH = 128, 32  # of the kernel: rows and columns, and values of a step
KINDS = ["s8s4", "s4s4"]
Operators = torch._ops._OpNamespace


def reference(kind: str, input: Tensor, *rest: Tensor | torch.dtype | None) -> Tensor:
    return shared.reference(pkg.ops.unpack_int4(input) if kind == "s4s4" else input, *rest)


def emulated(
    emulator: Emulator,
    kind: str,
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    blocks: int = 3,
) -> Tensor:
    out_dtype = out_dtype or input_scale.dtype
    output = torch.full((*input.shape[:-1], len(weight)), 77, dtype=out_dtype)
    emulator.run(
        f"rowwise_scaled_linear_{kind}",
        ["output"],
        blocks,
        type=name_of(input_scale.dtype),
        out_type=name_of(out_dtype),
        input=input,
        input_stride=input.stride(-1),
        rows_of=input.shape[:-1],
        input_strides=input.stride()[:-1],
        scale_strides=input_scale.stride(),
        input_scale=input_scale,
        weight=weight,
        weight_strides=weight.stride(),
        weight_scale=weight_scale,
        weight_scale_stride=weight_scale.stride(0),
        bias=bias,
        bias_stride=0 if bias is None else bias.stride(0),
        output=output,
        columns=len(weight),
        bytes=weight.shape[1],
    )
    return output


def assert_right(kind: str, result: Tensor, sample: Sample) -> None:
    (expected,) = expect(lambda each: [reference(kind, *each.args)], sample)
    expected.compare(result, f"rowwise_scaled_linear_{kind} of {sample}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dtypes(cuda_emulator: Emulator, kind: str, dtype: torch.dtype) -> None:
    for with_bias in (True, False):
        sample = shared.call((9,), 70, 130, kind == "s4s4", with_bias).converted(dtype)
        assert_right(kind, emulated(cuda_emulator, kind, *sample.args), sample)
    sample = shared.call((3,), 6, 5, kind == "s4s4", out_dtype=torch.float16).converted(dtype)
    assert_right(kind, emulated(cuda_emulator, kind, *sample.args), sample)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, kind: str) -> None:
    sizes = [(rows, 10, 3) for rows in around(TILE)]
    sizes += [(2, 10, columns) for columns in around(TILE)]
    sizes += [(3, inner, 6) for inner in (0, 2, *range(DEPTH - 6, DEPTH + 8, 2), 2 * DEPTH, 96)]
    sizes += [(0, 6, 3), (3, 6, 0)]
    for rows, inner, columns in sizes:
        sample = shared.call((rows,), inner, columns, kind == "s4s4").converted(torch.float32)
        assert_right(kind, emulated(cuda_emulator, kind, *sample.args), sample)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_and_layouts(cuda_emulator: Emulator, kind: str, blocks: int) -> None:
    sample = shared.call((2, 3, 7), 40, 260, kind == "s4s4").converted(torch.float32)
    input, row, weight, column, bias, _ = sample.args
    input = input.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    weight = weight.mT.contiguous().mT
    column, bias = (torch.stack([each, each], dim=1)[:, 0] for each in (column, bias))
    other = Sample((input, row.mT.contiguous().mT, weight, column, bias, None))
    assert_right(kind, emulated(cuda_emulator, kind, *other.args, blocks=blocks), other)
    for start in range(4):  # addresses of every alignment
        shifted = torch.empty(start + weight.numel(), dtype=torch.int8)[start:]
        shifted = shifted.view(weight.shape).copy_(weight)
        other = Sample((sample.args[0], row, shifted, column, bias, None))
        assert_right(kind, emulated(cuda_emulator, kind, *other.args, blocks=blocks), other)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_exact_at_the_ends_of_the_range(cuda_emulator: Emulator, kind: str) -> None:
    for left in (-8, 7) if kind == "s4s4" else (-128, 127):
        for right in (-8, 7):
            values = torch.full((2, 1000), left, dtype=torch.int8)
            weight = pkg.ops.pack_int4(torch.full((3, 1000), right))
            result = emulated(
                cuda_emulator,
                kind,
                pkg.ops.pack_int4(values) if kind == "s4s4" else values,
                torch.ones(2),
                weight,
                torch.ones(3),
                None,
                torch.float64,
            )
            assert (result == left * right * 1000).all()


def emulated_quantized(emulator: Emulator, input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    *lead, inner = input.shape
    values = torch.full((*lead, inner if bits == 8 else inner // 2), 77, dtype=torch.int8)
    scales = torch.full(lead, 77, dtype=input.dtype)
    emulator.run(
        "quantize_rowwise",
        ["values", "scales"],
        type=name_of(input.dtype),
        input=input,
        stride=input.stride(-1),
        rows_of=lead,
        row_strides=input.stride()[:-1],
        values=values,
        scales=scales,
        inner=inner,
        bits=bits,
    )
    return values, scales


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_quantised_rows_are_the_bits_of_the_cpu(
    cuda_emulator: Emulator, bits: int, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(9, inner, dtype=torch.float64) for inner in (0, 2, 30, 32, 34, 64, 130)]
    inputs += [torch.randn(2, 3, 7, 40).double().permute(1, 0, 3, 2)[..., :6], torch.zeros(3, 4)]
    # Rows that are read 16 bytes at a time but written unaligned, and rows that are not.
    inputs += [torch.randn(9, 64)[:, :46], torch.randn(9 * 64 + 1)[1:].view(9, 64)]
    special = torch.ones(4, 70)
    special[1, 33], special[2, 5] = torch.nan, -torch.inf
    special[3, ::2] = -0.99  # within 1/16 of the others, which turns the scale's limit
    for input in (*inputs, special):
        results = emulated_quantized(cuda_emulator, input.to(dtype), bits)
        for actual, expected in zip(
            results, pkg.ops.quantize_rowwise(input.to(dtype), bits), strict=True
        ):
            assert torch.equal(actual.double().nan_to_num(), expected.double().nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_the_operators_whole(emulated_operators: Operators, kind: str, dtype: torch.dtype) -> None:
    operator = getattr(emulated_operators, f"rowwise_scaled_linear_{kind}")
    for template in shared.samples(kind == "s4s4"):
        sample = template.converted(dtype)
        if template.values_only and (dtype != torch.float32 or sample.args[0].numel() > 20000):
            continue  # the kernels' tests have sizes of their own
        assert_right(kind, operator(*sample.args), sample)
    sample = shared.call((4, 3, 5), 8, 7, kind == "s4s4").converted(dtype)
    input, row, *rest = sample.args
    turned = Sample((input.transpose(0, 2), row.transpose(0, 2), *rest))
    assert_right(kind, operator(*turned.args), turned)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_the_signs_of_their_scales(emulated_operators: Operators, kind: str) -> None:
    operator = getattr(emulated_operators, f"rowwise_scaled_linear_{kind}")
    device = torch.device("cpu")
    shared.assert_zeros_have_the_signs_of_their_scales(operator, kind == "s4s4", device)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_the_quantising_operator_whole(emulated_operators: Operators, dtype: torch.dtype) -> None:
    for shape in ((), (3,), (4, 3, 5), (0,)):
        input = torch.randn(*shape, 34, dtype=torch.float64).to(dtype)
        for each in (input, input.transpose(0, -2) if input.dim() > 2 else input):
            for bits in (4, 8):
                results = emulated_operators.quantize_rowwise(each, bits)
                for actual, expected in zip(
                    results, pkg.ops.quantize_rowwise(each, bits), strict=True
                ):
                    assert torch.equal(actual, expected)
