"""The kernels and the host code of rotary_embedding on CUDA, run on the CPU by the emulator."""

from __future__ import annotations

import pytest
import references
import torch
from emulator import EmulationError, Emulator
from test_emulated_matmul import FLOATS, name_of
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

Operators = torch._ops._OpNamespace
TYPES = [(dtype, dtype) for dtype in FLOATS]
TYPES += [(dtype, torch.float32) for dtype in FLOATS if dtype != torch.float32]


def make(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def heads_inside(batch: int, heads: int, length: int, size: int) -> Tensor:
    """(batch, heads, length, size), as a projection gives them."""
    return make(batch, length, 3 * heads, size)[:, :, :heads].transpose(1, 2)


def tables(length: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = 3 * make(length, half, seed=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def assert_turned(
    result: Tensor, input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> None:
    turn = references.rotary_embedding_backward if back else references.rotary_embedding
    sample = Sample((input, cos, sin))
    (expected,) = expect(lambda each: [turn(*each.args, interleaved=interleaved)], sample)
    expected.compare(result, f"{sample}, {interleaved=}, {back=}")


def emulated(
    emulator: Emulator,
    way: str,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    back: bool = False,
) -> Tensor:
    output = torch.full_like(input, 77)
    views = {
        "output": output,
        "input": input,
        **{
            name: each.expand(*input.shape[:-1], each.shape[-1])
            for name, each in (("cos", cos), ("sin", sin))
        },
    }
    emulator.run(
        "rotary_embedding",
        ["output"],
        type=name_of(input.dtype),
        table_type=name_of(cos.dtype),
        way=way,
        rows=input.shape[:-1],
        inner=input.shape[-1],
        half=cos.shape[-1],
        interleaved=interleaved,
        turns_back=back,
        output=output,
        input=input,
        cos=cos,
        sin=sin,
        **{f"{name}_strides": each.stride() for name, each in views.items()},
    )
    return output


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "table"), TYPES, ids=name_of)
def test_rotary_embedding(
    cuda_emulator: Emulator, dtype: torch.dtype, table: torch.dtype, interleaved: bool
) -> None:
    """By packets, by elements and with indices of 64 bits; more rows than three blocks take."""
    packet = 16 // dtype.itemsize
    for way, half, rest in (("packets", 2 * packet, packet), ("elements", 3, 1), ("wide", 9, 0)):
        input = heads_inside(2, 3, 70, 2 * half + rest).to(dtype)
        cos, sin = tables(70, half, table)
        for back in (False, True):
            options = {"interleaved": interleaved, "back": back}
            result = emulated(cuda_emulator, way, input, cos, sin, **options)
            assert_turned(result, input, cos, sin, **options)


def test_which_rows_are_packets(cuda_emulator: Emulator) -> None:
    """Aligned ones whose elements are neighbours; and the host tells them from the others."""
    cos, sin = tables(5, 8, torch.float32)
    padded = make(5, 21).float()
    strided = make(5, 40).float()[:, ::2]
    for input, way in (
        (make(5, 20).float(), "packets"),
        (padded[:, :20], "elements"),
        (make(5 * 20 + 1).float()[1:].view(5, 20), "elements"),
        (strided, "elements"),
        (make(5, 18).float(), "elements"),
    ):
        other = {"packets": "elements", "elements": "packets"}[way]
        assert_turned(emulated(cuda_emulator, way, input, cos, sin), input, cos, sin, False, False)
        with pytest.raises(EmulationError, match=f"are not taken by {other}"):
            emulated(cuda_emulator, other, input, cos, sin)
    # A table that begins between two packets, and one whose elements are apart.
    wide = [torch.cat([each, each], 1) for each in (cos, sin)]
    input = make(5, 20).float()
    for columns in (slice(1, 9), slice(0, 16, 2)):
        table = [each[:, columns] for each in wide]
        result = emulated(cuda_emulator, "elements", input, *table)
        assert_turned(result, input, *table, False, False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "table"), TYPES, ids=name_of)
def test_the_operators(
    emulated_operators: Operators, dtype: torch.dtype, table: torch.dtype, interleaved: bool
) -> None:
    """Of every layout, against the reference; the strides are those of the CPU's operators."""
    for half, size in ((16, 40), (3, 7), (0, 8), (160, 320)):
        cos, sin = tables(5, half, table)
        own = torch.stack([cos, cos.flip(0)]).unsqueeze(1)  # positions of each sequence
        for input in (
            make(2, 3, 5, size),
            heads_inside(2, 3, 5, size),
            make(2, 3, size, 5).mT,
            make(2, 1, 5, size).expand(2, 3, 5, size),
            make(2, 0, 5, size),
        ):
            given = input.to(dtype) if input.stride(1) else input[:, :1].to(dtype).expand_as(input)
            for angles in ((cos, sin), (own, own.flip(2))):
                for name in ("rotary_embedding", "rotary_embedding_backward"):
                    options = {"interleaved": interleaved}
                    result = getattr(emulated_operators, name)(given, *angles, **options)
                    back = name == "rotary_embedding_backward"
                    assert_turned(result, given, *angles, interleaved, back)
                    ours = getattr(torch.ops.pkg, name)(given, *angles, **options)
                    assert result.stride() == ours.stride()


def test_wrong_arguments_are_refused_in_words(emulated_operators: Operators) -> None:
    x, table = torch.ones(2, 3, 6), torch.ones(3, 2)
    with pytest.raises(RuntimeError, match="sin has shape"):
        emulated_operators.rotary_embedding(x, table, table[:2])
