"""Bools whose bytes are others than 0 and 1, as a view of bytes has them: all but 0 are true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from samples import FLOATING, INTEGRAL
from torch import Tensor

import pkg

BYTES = (0, 1, 2, 255, 128, 0, 7)
COUNT = 5 * len(BYTES)


def add(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.result_type(a, b)
    out = torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=dtype, device=a.device)
    pkg.ops.add_out(a, b, out)
    return out


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("ours", "pytorchs"),
    [
        (add, torch.add),
        (pkg.ops.mul, torch.mul),
        (lambda a, b: pkg.ops.muladd(a, b, 0.5), lambda a, b: a * b + 0.5),
    ],
    ids=["add_out", "mul", "muladd"],
)
def test_bytes_that_are_no_bools(
    device: torch.device,
    dtype: torch.dtype,
    step: int,
    ours: Callable[[Tensor, Tensor], Tensor],
    pytorchs: Callable[[Tensor, Tensor], Tensor],
) -> None:
    memory = torch.tensor(BYTES, dtype=torch.uint8, device=device).repeat_interleave(5)
    odd = memory.repeat_interleave(step).view(torch.bool)[::step]
    assert odd.tolist() == [byte != 0 for byte in memory.tolist()]
    for other in (torch.full((COUNT,), 3, device=device).to(dtype), odd):
        for a, b in ((odd, other), (other, odd)):
            result = ours(a, b)
            if result.dtype == torch.bool:  # whose bytes are 0 and 1 now
                assert set(result.view(torch.uint8).tolist()) <= {0, 1}
            assert result.tolist() == pytorchs(a, b).tolist()
