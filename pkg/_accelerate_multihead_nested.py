"""Multi-head attention over sequences of several lengths, in a nested tensor, under accelerate().

``nn.TransformerEncoder`` makes a nested tensor of its input where ``src_key_padding_mask`` says
what is padding, and PyTorch's kernel pads it anew in each layer, for the scores and all behind
them. Here attention is this package's over packed sequences: of padding nothing is computed.

No table is asked: the kernel that is replaced pads, writes all scores and gathers what it padded.
The operator with its projections, 384 wide with 6 heads, one thread of a Zen 3 (2026-11-28, PyTorch
2.13), PyTorch's time over ours and in brackets over that of PyTorch's kernel with the products
taken over; of each batch the lengths are alike, and then spread evenly:

    longest    float32                    bfloat16
    32         1.2 (1.3), 1.3 (1.3)       8.3 (1.1), 9.0 (1.4)
    64         1.3 (1.15), 1.4 (1.35)     7.7 (1.1), 10.3 (1.3)
    128        1.4 (1.3), 2.4 (2.0)       10.6 (1.2), 15.7 (1.5)
    256        1.3 (1.3), 1.8 (1.8)       12.5 (1.3), 17.6 (1.7)
    1024       2.8 (1.6), 4.1 (2.0)       19.0 (1.5), 22.1 (1.8)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _accelerate_multihead, _accelerate_routes, _accelerate_varlen

KEY = "NestedTensorCPU"
# Of all sequences: with fewer the way through Python costs more than it gains.
LEAST_TOKENS = 16
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)

_Kernel = Callable[..., Any]


def kernel() -> _Kernel | None:
    """What goes by this package's attention, or else calls PyTorch's; None where it has none."""
    theirs = _accelerate_routes.original(_accelerate_multihead.OPERATOR, KEY)
    if theirs is None:
        return None
    return _accelerate_multihead.kernel_of(_self_attention, theirs, _KEYS)


def _self_attention(
    query: Tensor,
    embed_dim: int,
    num_head: int,
    *parameters: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor | None:
    """Projections included; None where the call is left to PyTorch, as with a mask."""
    if (
        not _accelerate_routes.attention_is_by_table()
        or mask is not None
        or not query.is_nested
        or query.layout is not torch.strided
        or query.ndim != 3
        or not query.is_contiguous()
        or not _accelerate_multihead.fit(query.dtype, embed_dim, num_head, parameters)
    ):
        return None
    sizes = query._nested_tensor_size()
    sequences = sizes.tolist()  # a few operators on a tensor would take longer than all else
    if not sequences or any(columns != embed_dim for _, columns in sequences):
        return None
    lengths = [rows for rows, _ in sequences]
    if sum(lengths) < LEAST_TOKENS:
        return None
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")
    qkv_weight, qkv_bias, proj_weight, proj_bias = parameters
    tokens = query.values().view(-1, embed_dim)
    projected = torch.nn.functional.linear(tokens, qkv_weight, qkv_bias)
    attended = _attend(projected.view(-1, 3, num_head, embed_dim // num_head), starts, max(lengths))
    made = torch.nn.functional.linear(attended.view(-1, embed_dim), proj_weight, proj_bias)
    strides, offsets = query._nested_tensor_strides(), query._nested_tensor_storage_offsets()
    return torch._nested_view_from_buffer(made.view(-1), sizes, strides, offsets)


def _attend(sides: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Of (tokens, 3, heads, head size), which are queries, keys and values."""
    begin = time.perf_counter_ns()
    attended: Tensor
    attended, *_ = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default(
        *sides.unbind(1), starts, starts, None, longest, longest, 0.0, None, False, False
    )
    nanoseconds = time.perf_counter_ns() - begin
    _accelerate_routes.count_taken(_accelerate_varlen.FORWARD, sides.dtype, nanoseconds)
    return attended
