"""All gradients of attention by one kernel of warpgroups, run on the CPU by the emulator."""

from __future__ import annotations

import pytest
import torch
from emulator import Emulator
from test_emulated_attention import (
    RESULTS,
    Call,
    assert_near,
    bounds_of,
    emulated_backward,
    emulated_forward,
    exact_results,
    make,
    name_of,
)
from test_emulated_attention_warpgroups import (
    HALVES,
    LIMITS,
    heads_inside,
    of_head,
    with_feature,
    with_operands,
)
from torch import Tensor


def gradients_of(
    emulator: Emulator, call: Call, blocks: int = 3, warpgroups: bool = True
) -> list[Tensor]:
    """The gradients, from the outputs of the kernels without warpgroups."""
    outputs = emulated_forward(emulator, call, blocks)
    return emulated_backward(
        emulator, call, outputs, blocks, warpgroups=warpgroups, joint=True
    )


def compare(call: Call, gradients: list[Tensor]) -> None:
    exact = exact_results(call)
    assert_near(RESULTS[2:5], gradients, exact[2:], bounds_of(call, exact)[2:])


def check(emulator: Emulator, call: Call, blocks: int = 3) -> list[Tensor]:
    gradients = gradients_of(emulator, call, blocks)
    assert emulator.counters.group_products > 0
    assert emulator.counters.products == 0
    compare(call, gradients)
    return gradients


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 128), (65, 129), (129, 127), (200, 270), (97, 400)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int, head: int
) -> None:
    check(cuda_emulator, of_head(head, rows=rows, columns=columns))
