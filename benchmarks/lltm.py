"""The recurrent cell of PyTorch's C++ extension tutorial, one step, forward and in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from pkg import ops

from ._lltm import SHAPES, Cell, eager, gradients, tensors_of, tutorial
from .harness import OURS, Case, Reference


def _both(
    dtype: torch.dtype,
    peers: dict[str, Cell],
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
) -> Iterator[Case]:
    """Each size, forward and then backward too."""
    name = str(dtype).removeprefix("torch.")
    for batch, features, states in shapes:
        tensors = tensors_of(device, dtype, (batch,), features, states)
        size = f"{name}, {batch} x {features} to {states}"
        if len(peers) > 2:
            size += ", with the tutorial's C++"
        work = 2 * batch * 3 * states * (states + features) / 1e9
        yield Case(
            size,
            {peer: partial(cell, *tensors) for peer, cell in peers.items()},
            Reference(eager, *tensors),
            work,
            "GFLOP/s",
            terms=states + features,
            limit=name,
        )
        yield Case(
            f"{size}, forward and backward",
            {peer: gradients(cell, tensors) for peer, cell in peers.items()},
            Reference(lambda *each: gradients(eager, each)(), *tensors),
            3 * work,
            "GFLOP/s",
            terms=max(3 * states, batch),
            limit=name,
        )


def cases(device: torch.device) -> Iterator[Case]:
    """Three sizes, beside the tutorial's Python."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _both(dtype, {OURS: ops.lltm, "PyTorch": eager}, device)


def full_cases(device: torch.device) -> Iterator[Case]:
    """Beside the tutorial's C++ too, which takes a compiler and a minute."""
    extension = tutorial() if device.type == "cpu" else None
    if extension is not None:
        peers = {OURS: ops.lltm, "PyTorch": eager, "tutorial C++": extension}
        for dtype in (torch.float32, torch.bfloat16):
            yield from _both(dtype, peers, device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """A batch and states of which a GPU has enough."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _both(dtype, {OURS: ops.lltm, "PyTorch": eager}, device, [(2048, 1024, 2048)])
