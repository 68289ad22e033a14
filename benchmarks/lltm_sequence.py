"""A sequence of the recurrent cell, in training, beside one step of PyTorch's after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pkg import ops

from ._lltm import SHAPES, Cell, eager, gradients, tensors_of
from .harness import OURS, Case, Reference

STEPS = 32


def steps_of(cell: Cell) -> Cell:
    """A sequence, by one cell after the other."""

    def run(
        input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = []
        for x in input:
            h, c = cell(x, weights, bias, h, c)
            states.append(h)
        return torch.stack(states), c

    return run


def _ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    hidden, cells = ops.lltm_sequence(*tensors)
    return hidden, cells[-1]


def cases(device: torch.device) -> Iterator[Case]:
    """Of the smaller two sizes, forward and backward."""
    peers = {OURS: _ours, "PyTorch": steps_of(eager)}
    for batch, features, states in SHAPES[:2]:
        tensors = tensors_of(device, torch.float32, (STEPS, batch), features, states)
        yield Case(
            f"float32, {STEPS} steps, {batch} x {features} to {states}, forward and backward",
            {peer: gradients(function, tensors) for peer, function in peers.items()},
            Reference(lambda *each: gradients(steps_of(eager), each)(), *tensors),
            3 * STEPS * 2 * batch * 3 * states * (states + features) / 1e9,
            "GFLOP/s",
            terms=STEPS * 3 * states,
            limit="float32",
        )
