"""A layer with a weight of four bits, beside PyTorch's operators and a product.

PyTorch's ``_weight_int4pack_mm_for_cpu`` takes a layout of its own and rounds each weight to
bfloat16; on CUDA ``_weight_int4pack_mm`` takes this one, in bfloat16 alone. The other peer writes
the weight out and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pkg import ops

from ._quantised import GROUP_SIZE, INNER_K_TILES, SHAPES, Weight, matrix
from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 4, 16, 128)


def _ours(input: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    return ops.int4_linear(input, packed, scales_and_zeros, GROUP_SIZE, INNER_K_TILES)


def _written_out(input: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    matrix = ops.dequantize_tensor_core_tiled_layout(
        packed, scales_and_zeros, GROUP_SIZE, INNER_K_TILES
    )
    return F.linear(input, matrix.to(input.dtype))


def _plain(input: Tensor, values: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """With a weight of real numbers, which only the product's dtype rounds."""
    return input @ matrix(values, scales_and_zeros, input.dtype).mT


def _pytorch(input: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    aten = torch.ops.aten
    on_cpu = input.device.type == "cpu"
    multiply = aten._weight_int4pack_mm_for_cpu if on_cpu else aten._weight_int4pack_mm
    result: Tensor = multiply(input, packed, GROUP_SIZE, scales_and_zeros)
    return result


def _case(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Case:
    outputs, inputs = shape
    input = torch.randn(rows, inputs, device=device).to(dtype)
    weight = Weight.random(outputs, inputs, device)
    from_memory = rows == 1
    copies = copies_beyond_caches(weight.packed, weight.scales_and_zeros) if from_memory else 1
    pairs = [(weight.packed.clone(), weight.scales_and_zeros.clone()) for _ in range(copies)]
    peers: dict[str, Callable[[], Tensor]] = {
        OURS: in_turn(_ours, [(input, *each) for each in pairs]),
        "written out": in_turn(_written_out, [(input, *each) for each in pairs]),
    }
    if device.type == "cpu":
        convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        # The scales in the input's dtype.
        theirs = [
            (input, convert(weight.values, INNER_K_TILES), each[1].to(dtype)) for each in pairs
        ]
        peers["PyTorch"] = in_turn(_pytorch, theirs)
    elif device.type == "cuda" and dtype == torch.bfloat16:
        peers["PyTorch"] = in_turn(_pytorch, [(input, *each) for each in pairs])
    return Case(
        f"{str(dtype).removeprefix('torch.')}, {rows} {'row' if rows == 1 else 'rows'}, "
        f"{inputs} to {outputs}",
        peers,
        Reference(_plain, input, weight.values, weight.scales_and_zeros),
        (weight.nbytes if from_memory else 2 * rows * inputs * outputs) / 1e9,
        "GB/s" if from_memory else "GFLOP/s",
        terms=inputs,
        limit="memory" if from_memory else f"{str(dtype).removeprefix('torch.')} by int4",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """One row, as when a model writes, is bound by reading the weight; many by the products."""
    for dtype in DTYPES:
        for rows in ROWS:
            yield _case(rows, SHAPES[0], dtype, device)
        yield _case(1, SHAPES[1], dtype, device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """The widest layer of Llama 8B."""
    for rows in (*ROWS, 2048):
        yield _case(rows, (14336, 4096), torch.bfloat16, device)
