"""The inference path of ``nn.MultiheadAttention`` and ``TransformerEncoder``, under accelerate().

PyTorch's kernel of ``_native_multi_head_attention`` on the CPU writes all scores to memory: a
product, a softmax over them, a product. Here the projections stay products, which are taken over or
left like any other, and attention between them is this package's, where the table takes it. With
one thread of a Zen 4 (2026-11-25, PyTorch 2.13, 384 wide) the whole operator is 1.10 and 1.06 times
as fast in bfloat16 and float32 with 196 and with 256 tokens, 1.33 and 1.23 with 1024; with 64 it is
a tie, and below the way through Python costs more than it gains.

With a mask PyTorch's kernel is slower, and fused attention is not. One thread of a Xeon with AMX
(2026-11-27), 128, 256 and 1024 tokens, in float32: causal 1.7, 2.3 and 4.3 times as fast, padding
1.8, 2.4 and 4.6, a mask of each head 1.4, 1.6 and 2.0, none 1.4, 1.5 and 2.2; in bfloat16 2.7, 3.9
and 7.8, 3.6, 4.9 and 11.6, 1.8, 2.1 and 2.6, 1.3, 1.4 and 2.0.

Sequences of several lengths in a nested tensor: ``_accelerate_multihead_nested.py``.

What cannot be taken over goes on to PyTorch's kernel in C++
(``csrc/cpu/accelerate/aten_multi_head.cpp``), where that finds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import _loader
from ._accelerate_routes import CPU_KEYS, attention_gain, original

OPERATOR = "_native_multi_head_attention"

# From so many tokens of a sequence on.
LEAST_TOKENS = 128
# How much faster than PyTorch's fused attention, with which the table compares, ours has to be: in
# half precision that one takes 1.25 times as long as the unfused one that is replaced here.
_LEAST_RATIO = {torch.float16: 1.3, torch.bfloat16: 1.3}

_libraries: list[torch.library.Library] = []

_Kernel = Callable[..., Any]


def kernels() -> Iterator[tuple[str, _Kernel]]:
    """By operator a kernel that goes by this package's attention, or else calls PyTorch's."""
    theirs = original(OPERATOR)
    if theirs is not None:
        yield OPERATOR, kernel_of(_self_attention, theirs, CPU_KEYS)


def kernel_of(
    self_attention: Callable[..., Tensor | None], theirs: _Kernel, keys: torch._C.DispatchKeySet
) -> _Kernel:
    """The operator by ``self_attention``, or by PyTorch's kernel what that leaves.

    Args:
        self_attention: is called as :func:`_self_attention` is.
        theirs: PyTorch's kernel.
        keys: what the dispatcher gives that one.
    """

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim: int,
        num_head: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        parameters = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        if (
            not need_weights
            and query is key
            and query is value
            and (
                result := self_attention(
                    query, embed_dim, num_head, *parameters, mask=mask, mask_type=mask_type
                )
            )
            is not None
        ):
            return result, None
        return theirs(  # type: ignore[no-any-return]
            *(keys, query, key, value, embed_dim, num_head, *parameters),
            *(mask, need_weights, average_attn_weights, mask_type),
        )

    return kernel


def _self_attention(
    query: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor | None:
    """None where the call is left to PyTorch."""
    parameters = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    if (
        query.ndim != 3
        or query.size(1) < LEAST_TOKENS
        or query.layout is not torch.strided
        or query.size(0) == 0
        or query.size(2) != embed_dim
        or not fit(query.dtype, embed_dim, num_head, parameters)
    ):
        return None
    if mask is None:
        hidden, seen = "nothing", None
    else:
        # Before the mask is read.
        if not any(_is_faster(query.dtype, query.size(1), by) for by in ("causal", "mask")):
            return None
        seen = _seen(mask, mask_type, (query.size(0), num_head, query.size(1)))
        if seen is None:
            return None
        hidden = "causal" if _is_causal(seen) else "mask"
    if not _is_faster(query.dtype, query.size(1), hidden):
        return None
    return _attend(query, num_head, parameters, hidden, seen)


def _is_faster(dtype: torch.dtype, tokens: int, hidden: str) -> bool:
    """Than the unfused kernel, with so many tokens and keys hidden by that."""
    gain = attention_gain(dtype, tokens, tokens, hidden)
    return gain > 0 and gain >= _LEAST_RATIO.get(dtype, 0)


def _seen(mask: Tensor, mask_type: int | None, sizes: tuple[int, int, int]) -> Tensor | None:
    """Of PyTorch's mask, which says what is hidden, the opposite, of four dimensions.

    None where the mask is not one that its kernel takes, and where a query sees nothing, of which
    that kernel makes NaN.

    Args:
        mask: (L, L) of type 0, (B, L) of type 1, (B, H, L, L) of type 2; of no other dtype than
            bool, what is not zero hides a key.
        mask_type: what its dimensions are.
        sizes: B, H and L.
    """
    batch, heads, tokens = sizes
    shapes = {0: (tokens, tokens), 1: (batch, tokens), 2: (batch, heads, tokens, tokens)}
    if mask_type not in shapes or mask.shape != shapes[mask_type] or mask.device.type != "cpu":
        return None
    if mask_type == 1:
        mask = mask[:, None, None]
    while mask.ndim < 4:
        mask = mask[None]
    for dim in (0, 1):  # one for all sequences or heads, expanded
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    seen = mask.logical_not()
    return seen if bool(seen.any(-1).all()) else None


def _is_causal(seen: Tensor) -> bool:
    tokens = seen.size(-1)
    if seen.shape != (1, 1, tokens, tokens) or bool(seen[0, 0, 0, -1]):
        return False
    return torch.equal(seen[0, 0], torch.ones_like(seen[0, 0]).tril_())


def fit(dtype: torch.dtype, width: int, heads: int, parameters: tuple[Tensor, ...]) -> bool:
    """Whether PyTorch's kernel would take these: what is wrong is for that one to say."""
    shapes = ((3 * width, width), (3 * width,), (width, width), (width,))
    return (
        dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and width > 0
        and heads > 0
        and width % heads == 0
        and all(
            each.dtype is dtype and each.shape == shape
            for each, shape in zip(parameters, shapes, strict=True)
        )
    )


def _attend(
    query: Tensor, heads: int, parameters: tuple[Tensor, ...], hidden: str, seen: Tensor | None
) -> Tensor:
    """Self-attention of (batch, tokens, width), projections included."""
    qkv_weight, qkv_bias, proj_weight, proj_bias = parameters
    batch, tokens, width = query.shape
    projected = torch.nn.functional.linear(query, qkv_weight, qkv_bias)
    sides = projected.view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(sides[0], sides[1], sides[2]),
        attn_mask=seen if hidden == "mask" else None,
        is_causal=hidden == "causal",
    )
    joined = attended.transpose(1, 2).reshape(batch, tokens, width)
    return torch.nn.functional.linear(joined, proj_weight, proj_bias)


def define_for_cpp() -> bool:
    """Defines the operator by which the kernel in C++ asks; False where another copy has."""
    _loader.cpu_library.pkg_accelerate_least_tokens(ctypes.c_int64(LEAST_TOKENS))
    library = torch.library.Library("pkg_accelerate", "FRAGMENT")
    try:
        library.define(
            f"{OPERATOR}(Tensor query, int embed_dim, int num_head, Tensor qkv_weight, "
            "Tensor qkv_bias, Tensor proj_weight, Tensor proj_bias, Tensor? mask, int? mask_type) "
            "-> Tensor?"
        )
    except RuntimeError:
        return False
    library.impl(OPERATOR, _self_attention, "CPU")
    _libraries.append(library)
    return True
