"""What the benchmarks of rowwise_scaled_linear_s8s4 and rowwise_scaled_linear_s4s4 have in common.

Their peers multiply weights that were unpacked beforehand: PyTorch's product of int8, scaled in a
second pass, and a linear layer in bfloat16, whose result is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pkg import ops

from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

ROWS = (1, 16, 128)
SHAPES = ((4096, 4096), (768, 3072))  # of Llama 8B and GPT-2 small
DTYPES = (torch.bfloat16, torch.float32)  # of scales, bias and output


def _pytorch(values: Tensor, scale: Tensor, weight: Tensor, column: Tensor, bias: Tensor) -> Tensor:
    sums = torch._int_mm(values, weight.mT).float()
    return (sums * scale.float()[:, None] * column.float() + bias.float()).to(scale.dtype)


def _plain(values: Tensor, scale: Tensor, weight: Tensor, column: Tensor, bias: Tensor) -> Tensor:
    wide = torch.promote_types(scale.dtype, torch.float32)
    sums = (values.double() @ weight.double().mT).to(wide)  # exact in float64
    return (sums * scale.to(wide)[:, None] * column.to(wide) + bias.to(wide)).to(scale.dtype)


def _copies(weight: Tensor, from_memory: bool) -> list[Tensor]:
    others = range(copies_beyond_caches(weight) - 1 if from_memory else 0)
    return [weight, *(weight.clone() for _ in others)]


def _case(
    operator: Callable[..., Tensor],
    bits: int,
    rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    inputs, outputs = shape
    input = torch.randn(rows, inputs, device=device).to(dtype)
    packed, column = ops.quantize_rowwise(torch.randn(outputs, inputs, device=device).to(dtype), 4)
    bias = torch.randn(outputs, device=device).to(dtype)
    given, scale = ops.quantize_rowwise(input, bits)
    values = ops.unpack_int4(given) if bits == 4 else given
    weight = ops.unpack_int4(packed)
    half = (weight * column[:, None].float()).bfloat16()
    # One row is bound by reading the weight, which is in no cache then.
    from_memory = rows == 1
    peers = {
        OURS: in_turn(
            operator, [(given, scale, w, column, bias) for w in _copies(packed, from_memory)]
        ),
        "PyTorch": in_turn(
            _pytorch, [(values, scale, w, column, bias) for w in _copies(weight, from_memory)]
        ),
        "bfloat16": in_turn(
            F.linear, [(input.bfloat16(), w, bias.bfloat16()) for w in _copies(half, from_memory)]
        ),
    }
    words = f"{rows} {'row' if rows == 1 else 'rows'}, {inputs} to {outputs}"
    return Case(
        f"{str(dtype).removeprefix('torch.')}, {words}",
        peers,
        Reference(_plain, values, scale, weight, column, bias),
        (packed.nbytes if from_memory else 2 * rows * inputs * outputs) / 1e9,
        "GB/s" if from_memory else "GFLOP/s",
        terms=inputs,
        limit="memory" if from_memory else "int8 by int4",
    )


def rowwise_scaled_cases(
    operator: Callable[..., Tensor], bits: int, device: torch.device
) -> Iterator[Case]:
    """Layers of real models, with one row, a few and many."""
    for rows in ROWS:
        yield _case(operator, bits, rows, SHAPES[0], DTYPES[0], device)
    yield _case(operator, bits, ROWS[-1], SHAPES[0], DTYPES[1], device)
    yield _case(operator, bits, ROWS[-1], SHAPES[1], DTYPES[0], device)


def rowwise_scaled_gpu_cases(
    operator: Callable[..., Tensor], bits: int, device: torch.device
) -> Iterator[Case]:
    """The widest layer of Llama 8B. PyTorch's product of int8 takes more than 16 rows."""
    for rows in (17, 128, 2048):
        yield _case(operator, bits, rows, (4096, 14336), DTYPES[0], device)
