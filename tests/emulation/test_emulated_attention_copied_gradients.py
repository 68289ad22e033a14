"""All gradients of attention in float32 by copied panels, run on the CPU by the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_emulated_attention_varlen as varlen
import torch
from emulator import Emulator
from test_emulated_attention import (
    Call,
    compare_gradients,
    emulated_backward,
    emulated_forward,
    make,
)
from test_emulated_attention_copied import LAYOUTS
from test_emulated_attention_joint_gradients import PACKED
from test_emulated_attention_warpgroups import LIMITS, heads_inside, with_operands
from torch import Tensor

SHARED_BYTES = 227 * 1024  # of a block of an H100


def by_copied_panels(
    emulator: Emulator, call: Call, blocks: int = 3, shared_bytes: int = SHARED_BYTES
) -> list[Tensor]:
    outputs = emulated_forward(emulator, call, blocks)
    gradients = emulated_backward(
        emulator, call, outputs, blocks, shared_bytes, joint=True, copied_panels=True
    )
    assert emulator.counters.copies > 0
    return gradients


def check(emulator: Emulator, call: Call, blocks: int = 3) -> list[Tensor]:
    gradients = by_copied_panels(emulator, call, blocks)
    compare_gradients(call, gradients)
    return gradients


def check_sums(emulator: Emulator, call: Call, blocks: int = 3) -> None:
    """They are those of panels that pass through registers, to the last bit."""
    gradients = check(emulator, call, blocks)
    outputs = emulated_forward(emulator, call)
    others = emulated_backward(emulator, call, outputs, joint=True)
    assert emulator.counters.copies == 0
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (63, 64), (64, 65), (65, 63), (128, 128), (129, 130), (193, 70)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, rows: int, columns: int, head: int
) -> None:
    check_sums(cuda_emulator, make(2, rows=rows, columns=columns, head=head))


@pytest.mark.parametrize(
    ("head", "value_head"),
    [(1, 1), (31, 33), (32, 64), (33, 65), (40, 40), (80, 80), (64, 3), (3, 128), (128, 24)],
)
def test_head_sizes_around_every_panel_and_width(
    cuda_emulator: Emulator, head: int, value_head: int
) -> None:
    check_sums(cuda_emulator, make(2, rows=70, columns=140, head=head, value_head=value_head))


@pytest.mark.parametrize("head", [40, 72])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(200, 330), (330, 200)])
def test_causal_and_windows(
    cuda_emulator: Emulator, rows: int, columns: int, limits: dict[str, object], head: int
) -> None:
    """Also where no key sees the first queries, or the last ones."""
    check_sums(cuda_emulator, make(rows=rows, columns=columns, head=head, **limits))  # type: ignore[arg-type]


FEATURES = {
    "cap": {"softcap": 2.0},
    "slopes": {"slopes": torch.tensor([0.5, 0.25])},
    "booleans": {"mask": torch.linspace(0, 1, 100 * 140).view(100, 140).cos() > 0.7},
    "numbers": {"mask": torch.linspace(-3, 3, 2 * 140).view(2, 1, 140)},
    "dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("head", [40, 72])
@pytest.mark.parametrize("feature", [*FEATURES, "all"])
def test_what_may_become_of_a_score(cuda_emulator: Emulator, head: int, feature: str) -> None:
    every = {name: value for each in FEATURES.values() for name, value in each.items()}
    options = every if feature == "all" else FEATURES[feature]
    check_sums(cuda_emulator, make(2, rows=100, columns=140, head=head, **options))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_grouped_queries(cuda_emulator: Emulator, blocks: int, inside: bool) -> None:
    """Each matrix of a block has its own slope, mask and words of dropout."""
    options = {"rows": 70, "columns": 140, "head": 24, "enable_gqa": True}
    options |= {"slopes": torch.rand(2, 6), "mask": torch.randn(2, 6, 1, 140), "dropout": 0.3}
    call = make(2, 6, key_lead=(2, 3), **options)
    check_sums(cuda_emulator, with_operands(call, heads_inside) if inside else call, blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", [64, 30])
def test_layouts(cuda_emulator: Emulator, layout: str, head: int) -> None:
    call = make(2, 3, rows=70, columns=65, head=head)
    assert call.grad_output is not None
    grad_output = LAYOUTS[layout](call.grad_output)
    arranged = replace(with_operands(call, LAYOUTS[layout]), grad_output=grad_output)
    check_sums(cuda_emulator, arranged)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(cuda_emulator: Emulator, name: str) -> None:
    """Of the forward pass too; and of queries that see no key."""
    rows, columns, options = PACKED[name]
    for sizes in ((24, 40), (72, 40)):
        call = varlen.make(rows, columns, (4, 2), sizes, torch.float32, **options)
        results = [
            varlen.emulated(cuda_emulator, call, blocks, joint=True, copied_panels=copied)
            for blocks, copied in ((3, False), (2, True), (100, True))
        ]
        varlen.compare(call, results[1])
        for others in results[1:]:
            assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.parametrize("head", [64, 128])
def test_devices_of_less_memory_take_the_other_kernel(cuda_emulator: Emulator, head: int) -> None:
    call = make(rows=70, columns=70, head=head)
    outputs = emulated_forward(cuda_emulator, call)
    for kibibytes, copies in ((227, True), (163, False), (99, False)):
        options = {"shared_bytes": kibibytes * 1024, "joint": True, "copied_panels": True}
        emulated_backward(cuda_emulator, call, outputs, **options)  # type: ignore[arg-type]
        assert (cuda_emulator.counters.copies > 0) == copies
