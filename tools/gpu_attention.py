"""Attention in each way beside the plainest, for ``gpu_check.py sample``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pkg import ops
from pkg.testing.tolerance import expect_beside

SEED = 5
VARIABLE = "PKG_CUDA_WARPGROUPS"
JOINT_VARIABLE = "PKG_CUDA_JOINT_GRADIENTS"
FEW_VARIABLE = "PKG_CUDA_FEW_QUERIES"
COPIED_VARIABLE = "PKG_CUDA_COPIED_ATTENTION"
# By what is not 0 then, the variables that are.
HALF_WAYS: dict[str, tuple[str, ...]] = {
    VARIABLE: (),
    f"{JOINT_VARIABLE} is 0 and {VARIABLE}": (JOINT_VARIABLE,),
    JOINT_VARIABLE: (VARIABLE,),
    FEW_VARIABLE: (VARIABLE, JOINT_VARIABLE),
}
WAYS = {
    torch.bfloat16: HALF_WAYS,
    torch.float16: HALF_WAYS,
    torch.float32: {
        JOINT_VARIABLE: (VARIABLE, FEW_VARIABLE, COPIED_VARIABLE),
        COPIED_VARIABLE: (VARIABLE, FEW_VARIABLE),
    },
}
VARIABLES = (VARIABLE, JOINT_VARIABLE, FEW_VARIABLE, COPIED_VARIABLE)
# Queries, keys: a few queries of few and of many keys, parts of tiles, more tiles than stages,
# blocks for four rounds of any GPU and as many tiles of queries as of keys; head sizes of queries
# and of values.
LENGTHS = ((1, 1), (1, 5000), (5, 700), (63, 129), (300, 520), (1000, 2100), (6000, 12000))
RESULTS = ("attention", "grad_query", "grad_key", "grad_value")
HEADS = ((64, 64), (40, 72), (128, 128), (256, 200))


def features(queries: int, keys: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """What may become of a score, by name."""
    mask = torch.rand(3, 1, queries, keys, device=device) > 0.2
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "in a window": {"window_left": 70, "window_right": 3},
        "of groups": {"enable_gqa": True},
        "masked": {"attn_mask": mask},
        "dropped": {"dropout_p": 0.3},
        "capped": {"softcap": 3.0, "alibi_slopes": torch.rand(4, device=device)},
    }


def operands(key_heads: int, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Query, key, value and the gradient of the output, whose heads lie inside, in float32."""
    queries, keys, head, value_head = sizes
    shapes = [(queries, 4, head), (keys, key_heads, head), (keys, key_heads, value_head)]
    shapes.append((queries, 4, value_head))
    return [torch.randn(3, *shape, device=device).transpose(1, 2) for shape in shapes]


def attended(inputs: Sequence[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Attention of the inputs and their gradients; dropout draws the same each time."""
    torch.manual_seed(SEED)
    *leaves, grad_output = [each.detach().requires_grad_() for each in inputs]
    output: Tensor = ops.scaled_dot_product_attention(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


@contextmanager
def turned_off(variables: Iterable[str]) -> Iterator[None]:
    """What these variables name is not done here."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= dict.fromkeys(before, "0")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def attended_without(
    variables: Iterable[str], inputs: Sequence[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """The same where what the variables name is turned off."""
    with turned_off(variables):
        return attended(inputs, options)


def ways_that_attend(
    device: torch.device,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    heads: Sequence[Sequence[int]] = HEADS,
) -> Iterator[str]:
    """Where a way is further from attention in float64 than it may be beside the plainest.

    By the rule of ``pkg.testing``, for which the result with all ways turned off is the plain one.
    """
    for dtype, length, head in itertools.product(WAYS, lengths, heads):
        for name, options in features(*length, device).items():
            key_heads = 2 if "enable_gqa" in options else 4
            inputs = [each.to(dtype) for each in operands(key_heads, (*length, *head), device)]
            if name == "plain":  # and once with the heads outside
                inputs = [each.contiguous() for each in inputs]
            try:
                exact = attended([each.double() for each in inputs], options)
                plain = attended_without(VARIABLES, inputs, options)
            except RuntimeError as fault:
                yield str(fault)
                continue
            for way, without in WAYS[dtype].items():
                try:
                    ours = attended_without(without, inputs, options)
                    for result, *values in zip(RESULTS, exact, plain, ours, strict=True):
                        what = f"{result} of {dtype}, {length}, heads {head}, {name}"
                        expect_beside(values[0], values[1]).compare(values[2], what)
                except (AssertionError, RuntimeError) as fault:
                    yield f"{fault}, where {way} is not 0"
