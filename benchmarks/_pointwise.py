"""What the elementwise operators have in common: their sizes, dtypes and unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .harness import OURS, Case, Reference, copies_beyond_caches, each_in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The cost of a call; tensors that stay in the cache; tensors that do not.
SIZES = (64, 64 * 1024, 16 * 1024 * 1024)


def pointwise_cases(
    device: torch.device,
    inputs: int,
    ours: Callable[..., Tensor],
    pytorch: Callable[..., Tensor],
    into_output: bool = False,
) -> Iterator[Case]:
    """Cases of an operator that reads `inputs` tensors of one shape and writes another one.

    Args:
        device: of the tensors.
        inputs: how many there are.
        ours: the operator.
        pytorch: what it stands beside.
        into_output: both take the tensor to write into as ``out=``, and return it.
    """
    for dtype in DTYPES:
        for size in SIZES:
            tensors = [torch.randn(size, device=device).to(dtype) for _ in range(inputs)]
            large = size == max(SIZES)
            used = (inputs + 1) * tensors[0].nbytes
            copies = copies_beyond_caches(*tensors, used=used) if large else 1
            groups = [tensors, *([t.clone() for t in tensors] for _ in range(copies - 1))]
            peers = {}
            for peer, function in ((OURS, ours), ("PyTorch", pytorch)):
                # An output for each peer: the case compares what they hold.
                calls = [
                    partial(function, *group, out=torch.empty_like(group[0]))
                    if into_output
                    else partial(function, *group)
                    for group in groups
                ]
                peers[peer] = each_in_turn(calls)
            yield Case(
                f"{str(dtype).removeprefix('torch.')}, {size:,}",
                peers,
                Reference(pytorch, *tensors),
                used / 1e9,
                "GB/s",
                limit="memory" if large else None,
            )
