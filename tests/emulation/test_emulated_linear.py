"""The kernels of linear, run on the CPU by the emulator, against PyTorch in float64."""

from __future__ import annotations

import pytest
import references
import torch
from emulator import Emulator
from test_emulated_matmul import FLOATS, TILES, WIDE, around, make, name_of
from torch import Tensor

ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]


def emulated_linear(
    emulator: Emulator,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    keep: bool = False,
    blocks: int = 3,
    tile_columns: int = 0,
    multiplied_as: str | None = None,
    tiles: str = "block",
    layout: str = "tiles",
    share_shift: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The output, and the activation's argument where it is to be kept.

    With ``tile_columns`` of 128 or 256 warpgroups multiply tiles of so many. With a ``layout`` of
    the weight it is the kernel for few rows (test_emulated_few_rows.py).
    """
    *batch, rows, inner = input.shape
    output = torch.full((*batch, rows, weight.shape[0]), 77, dtype=input.dtype)
    pre_activation = torch.full_like(output, 77) if keep else None
    emulator.run(
        "linear",
        ["output", "pre_activation"] if keep else ["output"],
        blocks,
        type=multiplied_as or name_of(input.dtype),
        activation=activation,
        input=input,
        weight=weight,
        bias=bias,
        output=output,
        pre_activation=pre_activation,
        rows=rows,
        columns=weight.shape[0],
        inner=inner,
        tile_columns=tile_columns,
        tiles=tiles,
        layout=layout,
        share_shift=share_shift,
        input_strides=input.stride()[-2:],
        weight_strides=weight.stride(),
        bias_stride=bias.stride(0) if bias is not None else 0,
        batch=batch,
        batch_strides=input.stride()[:-2],
    )
    return output, pre_activation


def assert_linear(
    result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> None:
    """The bound of a product (test_emulated_matmul.py), through the activation, and rounded.

    No activation is steeper than 1.13, and each is computed to a few units of roundoff of its
    argument.
    """
    name = None if activation == "none" else activation
    wide_bias = None if bias is None else bias.double()
    sums = references.linear(input.double(), weight.double(), wide_bias)
    exact = references.activated(sums, name)
    magnitude = input.double().abs() @ weight.double().abs().mT
    if wide_bias is not None:
        magnitude = magnitude + wide_bias.abs()
    roundoff = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps / 2
    bound = 1.13 * 1.01 * (input.shape[-1] + 1) * roundoff * magnitude
    bound += 16 * roundoff * sums.abs() if name not in (None, "relu") else 0
    bound += torch.finfo(result.dtype).eps / 2 * (exact.abs() + bound)
    bound += torch.finfo(result.dtype).smallest_normal
    if input.dtype == torch.float64:  # the reference has errors of its own
        bound *= 2
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(cuda_emulator: Emulator, activation: str, with_bias: bool) -> None:
    input, weight = make(9, 33, dtype=torch.float32), make(130, 33, dtype=torch.float32)
    bias = make(130, dtype=torch.float32) if with_bias else None
    for keep in (False, True):
        output, kept = emulated_linear(cuda_emulator, input, weight, bias, activation, keep)
        assert_linear(output, input, weight, bias, activation)
        if kept is not None:
            assert_linear(kept, input, weight, bias, "none")


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    tile_rows, tile_columns, tile_depth = TILES.get(dtype, WIDE)
    sizes = [(rows, 5, 3) for rows in around(tile_rows)]
    sizes += [(2, 5, columns) for columns in around(tile_columns)]
    sizes += [(3, depth, 6) for depth in (0, *around(tile_depth), 2 * tile_depth)]
    sizes += [(0, 5, 3), (3, 5, 0)]
    for rows, inner, columns in sizes:
        input, weight = make(rows, inner, dtype=dtype), make(columns, inner, dtype=dtype)
        bias = make(columns, dtype=dtype)
        output, kept = emulated_linear(cuda_emulator, input, weight, bias, "gelu", keep=True)
        assert_linear(output, input, weight, bias, "gelu")
        assert kept is not None
        assert_linear(kept, input, weight, bias, "none")


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_and_layouts(cuda_emulator: Emulator, blocks: int) -> None:
    dtype = torch.float32
    input = make(7, 3, 2, 9, dtype=dtype).permute(2, 1, 0, 3)
    weight = make(9, 260, dtype=dtype).mT[::2]
    bias = make(260, dtype=dtype)[::2]
    output, kept = emulated_linear(cuda_emulator, input, weight, bias, "silu", True, blocks)
    assert_linear(output, input, weight, bias, "silu")
    assert kept is not None
    assert_linear(kept, input, weight, bias, "none")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values_stay_in_their_row(cuda_emulator: Emulator, value: float) -> None:
    input, weight, bias = torch.ones(5, 9), torch.ones(6, 9), torch.ones(6)
    input[2, 8] = value
    for activation in ACTIVATIONS[1:]:
        output, _ = emulated_linear(cuda_emulator, input, weight, bias, activation)
        exact = references.linear(input.double(), weight.double(), bias.double(), activation)
        torch.testing.assert_close(output.double(), exact, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=name_of)
def test_packing_transposes(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 1), (31, 33), (32, 32), (33, 64), (65, 5), (0, 3), (3, 0)):
        for weight in (make(rows, columns, dtype=dtype), make(columns, rows, dtype=dtype).mT):
            pitch = (rows + 7) // 8 * 8
            packed = torch.zeros(columns, pitch, dtype=dtype)
            cuda_emulator.run(
                "pack_linear_weight",
                ["packed"],
                weight=weight,
                packed=packed,
                element_size=weight.element_size(),
                out_features=rows,
                in_features=columns,
                strides=weight.stride(),
            )
            assert torch.equal(packed[:, :rows], weight.mT)
            assert not packed[:, rows:].any()
