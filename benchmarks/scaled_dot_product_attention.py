"""Attention: forward, forward and backward, and decoding against a key and value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pkg import ops

from .harness import OURS, Case, ForeignCall, copies_beyond_caches, in_turn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Attention = Callable[..., Tensor]
FUNCTIONS: dict[str, Attention] = {
    OURS: ops.scaled_dot_product_attention,
    "PyTorch": functional.scaled_dot_product_attention,
}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]


def _gradients(attention: Attention, inputs: list[Tensor], causal: bool) -> Tensor:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attention(*leaves, is_causal=causal)
    return torch.cat(torch.autograd.grad(output.sum(), leaves))


def _call(attention: Attention, inputs: list[Tensor], causal: bool) -> Tensor:
    return attention(*inputs, is_causal=causal)


def _case(
    call: Callable[[Attention, list[Tensor], bool], Tensor],
    inputs: list[Tensor],
    causal: bool,
    name: str,
    work: float,
    unit: str,
    limit: str,
    copies: int = 1,
) -> Case:
    def exact() -> Tensor:
        exact_inputs = [tensor.double() for tensor in inputs]
        return call(functional.scaled_dot_product_attention, exact_inputs, causal)

    groups = [inputs, *([tensor.clone() for tensor in inputs] for _ in range(copies - 1))]
    # zentorch has the forward pass alone.
    zentorch = None
    if call is _call:
        zentorch = ForeignCall("zentorch_sdpa", inputs, {"is_causal": causal}, copies)
    return Case(
        f"{str(inputs[0].dtype).removeprefix('torch.')}, {name}",
        {
            peer: in_turn(partial(call, function), [(group, causal) for group in groups])
            for peer, function in FUNCTIONS.items()
        },
        exact,
        work,
        unit,
        limit=limit,
        zentorch=zentorch,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Cases of every dtype."""
    batch, heads, length, size = 1, 8, 1024, 64
    products = 4 * batch * heads * length**2 * size / 1e9
    shape = f"{batch}x{heads}x{length}x{size}"
    for dtype in DTYPES:
        inputs = _inputs((batch, heads, length, size), dtype, device)
        limit = str(dtype).removeprefix("torch.")
        yield _case(_call, inputs, False, shape, products, "GFLOP/s", limit)
        # Causal: the work above the diagonal is not counted.
        yield _case(_call, inputs, True, f"{shape} causal", products / 2, "GFLOP/s", limit)
    for dtype in DTYPES[:2]:
        inputs = _inputs((batch, heads, length, size), dtype, device)
        limit = str(dtype).removeprefix("torch.")
        # The backward pass does five products where the forward pass does two.
        work = products * 3.5
        yield _case(_gradients, inputs, False, f"{shape} with backward", work, "GFLOP/s", limit)
    batch, length = 8, 4096
    for dtype in DTYPES:
        inputs = _inputs((batch, heads, length, size), dtype, device)
        inputs[0] = inputs[0][:, :, :1]
        work = 2 * inputs[1].numel() * inputs[1].element_size() / 1e9
        name = f"{batch}x{heads}, one query, {length} keys"
        copies = copies_beyond_caches(*inputs)
        yield _case(_call, inputs, False, name, work, "GB/s", "memory", copies)
