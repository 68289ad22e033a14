"""What the elementwise operators have in common: their sizes, dtypes and unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .harness import OURS, Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The cost of a call; a tensor that stays in the cache; one that does not.
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

            def exact(tensors: list[Tensor] = tensors) -> Tensor:
                return pytorch(*(tensor.double() for tensor in tensors))

            # One for each peer: the case compares what they hold.
            outputs = [
                {"out": torch.empty_like(tensors[0])} if into_output else {} for _ in range(2)
            ]
            yield Case(
                f"{str(dtype).removeprefix('torch.')}, {size:,}",
                {
                    OURS: partial(ours, *tensors, **outputs[0]),
                    "PyTorch": partial(pytorch, *tensors, **outputs[1]),
                },
                exact,
                (inputs + 1) * size * tensors[0].element_size() / 1e9,
                "GB/s",
            )
