"""Rotating queries by their positions, beside the same formula in PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pkg import ops

from .harness import OURS, Case, Reference, copies_beyond_caches, in_turn

# Batch, heads, tokens and size of a head: the example's, and one of 7 billion parameters.
SHAPES = ((8, 6, 256, 64), (4, 32, 2048, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def _halves(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, y = input.chunk(2, -1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)


def _neighbours(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, y = input[..., ::2], input[..., 1::2]
    return torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)


def _both_ways(turn: Turn, input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the input, after the forward pass."""
    leaf = input.detach().requires_grad_()
    output = turn(leaf, cos, sin)
    (gradient,) = torch.autograd.grad(output, leaf, output.detach())
    return gradient


def _heads(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As a projection gives them: the heads of a token side by side."""
    batch, heads, tokens, size = shape
    return torch.randn(batch, tokens, heads, size, device=device).to(dtype).transpose(1, 2)


def _case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    interleaved: bool,
    trains: bool,
) -> Case:
    input = _heads(shape, dtype, device)
    angles = torch.rand(shape[2], shape[3] // 2, device=device) * 6
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    ours: Turn = partial(ops.rotary_embedding, interleaved=interleaved)
    pytorch: Turn = _neighbours if interleaved else _halves
    if trains:
        ours, pytorch = partial(_both_ways, ours), partial(_both_ways, pytorch)
    used = (4 if trains else 2) * input.nbytes
    large = shape == SHAPES[-1]
    copies = copies_beyond_caches(input, used=used) if large else 1
    calls = [(each, *tables) for each in (input, *(input.clone() for _ in range(copies - 1)))]
    pairs = "neighbours" if interleaved else "halves"
    passes = ", forward and backward" if trains else ""
    return Case(
        f"{str(dtype).removeprefix('torch.')}, {shape}, {pairs}{passes}",
        {OURS: in_turn(ours, calls), "PyTorch": in_turn(pytorch, calls)},
        Reference(pytorch, input, *tables),
        used / 1e9,
        "GB/s",
        limit="memory" if large else None,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Both kinds of pairs; training of one."""
    for shape in SHAPES:
        for dtype in DTYPES:
            for interleaved, trains in ((False, False), (True, False), (False, True)):
                yield _case(shape, dtype, device, interleaved, trains)
