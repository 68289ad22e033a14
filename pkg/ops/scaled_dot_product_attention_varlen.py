"""``scaled_dot_product_attention_varlen``: attention over a packed batch of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._attention import (
    drawn_seed,
    has_residual,
    refuse_derivatives_of_slopes,
    refuse_distributed_dropout,
)
from ._attention_derivatives import Call, Directions, output_tangent, second_derivatives
from ._call import operator, part
from ._forward_mode import or_zeros
from ._registration import (
    check_one_device,
    library,
    recording,
    register_below_autograd,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
    register_recording,
)
from ._sharding import Description, register_sharding
from ._vmap import each_slice

_Three = tuple[Tensor, Tensor, Tensor]


TABLE = (
    "the same within each sequence of a packed batch, nothing padded; the first ten arguments of "
    "flash-attn's `flash_attn_varlen_func`, in its order and by its names, but for its `q`, `k` "
    "and `v`",
    "floating",
    "yes",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def scaled_dot_product_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes attention within each sequence of a packed batch, without any padding.

    The sequences' tokens follow one another in the first dimension, as for
    ``flash_attn_varlen_func`` of the flash-attn package
    (https://github.com/Dao-AILab/flash-attention), whose first ten arguments these are:
    their order, their meaning and, but for its ``q``, ``k`` and ``v``, their names. Its
    ``window_size`` is ``(window_left, window_right)``, ``softcap`` and ``alibi_slopes`` have
    its names and meaning.
    Sequence b has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``, and
    keys and values likewise. Algorithm and memory are those of
    :func:`scaled_dot_product_attention`; any strides are read in place. A second
    derivative pads: its memory is that of B Hq matrices of max_seqlen_q x max_seqlen_k.

    Args:
        query: Shape (total_q, Hq, E); float16, bfloat16, float32 or float64.
        key: Shape (total_k, Hk, E), of the same dtype and device. Hq is a multiple of
            Hk: each key head is shared by as many neighbouring query heads.
        value: Shape (total_k, Hk, Ev), likewise.
        cu_seqlens_q: Shape (B + 1,), int32 or int64, on the same device: where each
            sequence's queries begin, and behind the last one's end. It does not decrease,
            and a sequence may be empty. Tokens in front of the first offset and behind
            the last, such as padding, belong to no sequence.
        cu_seqlens_k: The same for keys and values.
        max_seqlen_q: At least the most queries of a sequence. Of a longer one the first so many
            are computed, and the tokens beyond belong to no sequence: to refuse them, the host
            would have to wait for the device.
        max_seqlen_k: The same for keys and values.
        dropout_p: Probability with which a weight is dropped; the others are
            divided by ``1 - dropout_p``. Drawn from PyTorch's generator, so that
            :func:`torch.manual_seed` reproduces it. Always applied: pass 0 to
            evaluate.
        softmax_scale: Factor of the scores; ``1 / sqrt(E)`` by default.
        causal: The last query of a sequence sees all its keys, the one before all
            but the last, and so on: of q queries and k keys, query i sees the keys
            0 to i + k - q. Where q > k the first queries see none. Of a sequence that is
            longer than a maximum, q and k are those that are computed.
        window_left: How many keys before its own a query sees; -1: all. Query i's own key
            is key i + k - q. Keys that no query of a block sees are not computed.
        window_right: How many keys behind its own a query sees; -1: all. ``causal`` makes
            it 0.
        softcap: Scores, scaled, become ``softcap * tanh(score / softcap)``; 0: they stay as
            they are.
        alibi_slopes: Shape (Hq,) or (B, Hq), float32 or ``query``'s dtype: to the scores
            ``-slope * |i + k - q - j|`` is added, behind the cap. It may not require grad.

    Returns:
        Shape (total_q, Hq, Ev), contiguous. A query without any key gets zeros, and so does a
        token of no sequence, as do its gradients.

    Raises:
        RuntimeError: Shapes do not fit, dtypes or devices differ or are not supported,
            ``dropout_p`` is no probability, a side of the window is less than -1, ``softcap``
            is negative or not finite, or ``alibi_slopes`` requires grad; on the CPU also if
            offsets decrease or lie outside the tokens.

    Example:
        >>> value = torch.tensor([[[1.0]], [[3.0]], [[5.0]]])
        >>> query = key = torch.zeros(3, 1, 4)
        >>> starts = torch.tensor([0, 2, 3])  # a sequence of two tokens and one of one
        >>> attend = scaled_dot_product_attention_varlen
        >>> attend(query, key, value, starts, starts, 2, 2).flatten()
        tensor([2., 2., 5.])
        >>> attend(query, key, value, starts, starts, 2, 2, causal=True).flatten()
        tensor([1., 2., 5.])
    """
    return torch.ops.pkg.scaled_dot_product_attention_varlen.default(
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal),
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def _record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The same with the dispatcher left out: without a seed to draw it is the forward operator."""
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k)
    options = (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal)
    output: Tensor
    if dropout_p != 0.0:
        output = torch.ops.pkg.scaled_dot_product_attention_varlen.default(
            *tensors,
            *options,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return output
    forward = recording("scaled_dot_product_attention_varlen_forward")
    extras = (alibi_slopes, window_left, window_right, softcap)
    output, *_ = forward(*tensors, None, *options, True, *extras)
    return output


_attention_backward: Callable[..., _Three] = part("scaled_dot_product_attention_varlen_backward")


def _decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The composite operator: draws the seed, under vmap as ``randomness`` says.

    In Python, where a maximum that torch.compile does not know stays unknown.
    """
    seed = drawn_seed(query, dropout_p)
    forward = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default
    output: Tensor = forward(
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, seed),
        *(max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, False),
        *(alibi_slopes, window_left, window_right, softcap),
    )[0]
    return output


def _below_autograd(
    enter: Callable[..., _Three],
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The same of tensors whose kernel may be entered."""
    seed = drawn_seed(query, dropout_p)
    return enter(
        *(keys, query, key, value, cu_seqlens_q, cu_seqlens_k, seed),
        *(max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, False),
        *(alibi_slopes, window_left, window_right, softcap),
    )[0]


@register_fake("scaled_dot_product_attention_varlen_forward")
def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    keeps_residual: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> _Three:
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_seed, alibi_slopes)
    check_one_device("scaled_dot_product_attention_varlen", *(t for t in tensors if t is not None))
    torch._check(
        query.shape[-1] == key.shape[-1], lambda: "query and key differ in their last dimension"
    )
    torch._check(
        key.shape[:2] == value.shape[:2], lambda: "key and value differ in tokens or heads"
    )
    tokens, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty((tokens, heads, value.shape[-1]))
    return (
        output,
        query.new_empty((heads, tokens), dtype=dtype),
        torch.empty_like(output) if has_residual(query, keeps_residual) else query.new_empty((0,)),
    )


@register_fake("scaled_dot_product_attention_varlen_backward")
def _fake_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> _Three:
    tensors = (grad_output, query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_seed, output)
    check_one_device(
        "scaled_dot_product_attention_varlen_backward",
        *(t for t in (*tensors, log_sum_exp, output_residual, alibi_slopes) if t is not None),
    )
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Three) -> None:
    refuse_derivatives_of_slopes("requires a gradient", ctx.needs_input_grad[12])
    ctx.save_for_backward(*inputs[:6], *output, inputs[12])
    ctx.options = inputs[6:11]
    ctx.extras = inputs[13:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, slopes = ctx.saved_tensors
    gradients = _attention_backward(grad, *tensors, *ctx.options, slopes, *ctx.extras)
    return (
        *(g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False)),
        *(None,) * (len(ctx.needs_input_grad) - 3),
    )


def _setup_double_backward(ctx: Any, inputs: tuple[Any, ...], output: _Three) -> None:
    refuse_derivatives_of_slopes("requires a gradient", ctx.needs_input_grad[15])
    ctx.save_for_backward(*inputs[:7], inputs[15])
    ctx.options = inputs[10:15]
    ctx.extras = inputs[16:]


class _Packing:
    """The way from packed tokens to padded sequences and back, for one side of attention."""

    def __init__(self, cu_seqlens: Tensor, longest: int, tokens: int) -> None:
        first = cu_seqlens[:-1].long()
        positions = torch.arange(longest, device=cu_seqlens.device)
        self.exists = positions < (cu_seqlens[1:].long() - first).unsqueeze(-1)
        self.counts = self.exists.sum(-1)
        # A place without a token takes the last one, and loses it again.
        self.token = (first.unsqueeze(-1) + positions).clamp(max=max(tokens - 1, 0))
        self.tokens = tokens
        self.is_empty = tokens == 0 or first.shape[0] == 0 or longest == 0
        if self.is_empty:
            return
        every = torch.arange(tokens, device=cu_seqlens.device)
        # The end of the last sequence begins one without tokens, to which all go that no other has.
        begins, counts = cu_seqlens.long(), torch.nn.functional.pad(self.counts, (0, 1))
        sequence = torch.searchsorted(begins, every, right=True) - 1
        position = every - begins[sequence]
        is_inside = (position >= 0) & (position < counts[sequence])
        self.is_covered = is_inside[:, None, None]
        self.sequence = sequence.where(is_inside, 0)
        self.position = position.where(is_inside, 0)

    def pad(self, packed: Tensor) -> Tensor:
        """(tokens, heads, size) to (sequences, heads, longest, size), zero where there is none."""
        shape = (*self.token.shape, *packed.shape[1:])
        if self.is_empty:
            return packed.new_zeros(shape).transpose(1, 2)
        padded = packed[self.token.flatten()].view(shape)
        return padded.masked_fill(~self.exists[..., None, None], 0.0).transpose(1, 2)

    def pack(self, padded: Tensor) -> Tensor:
        """The inverse of :meth:`pad`; zero for tokens of no sequence."""
        if self.is_empty:
            return padded.new_zeros(self.tokens, padded.shape[1], padded.shape[3])
        packed = padded.transpose(1, 2)[self.sequence, self.position]
        return packed.masked_fill(~self.is_covered, 0.0)


def _mask_of_padding(
    rows: _Packing,
    columns: _Packing,
    causal: bool,
    window_left: int,
    window_right: int,
    slopes: Tensor | None,
) -> Tensor:
    """What dense attention over padded sequences takes as a mask: (sequences, heads or 1, L, S).

    Booleans, or with slopes what is added to the scores.
    """
    mask = rows.exists.unsqueeze(-1) & columns.exists.unsqueeze(-2)
    row, column = (
        torch.arange(side.exists.shape[1], device=mask.device) for side in (rows, columns)
    )
    # How far a key lies behind the query's own, which ends with the sequence.
    own = row + (columns.counts - rows.counts).unsqueeze(-1)
    behind = column - own.unsqueeze(-1)
    if causal or window_right >= 0:
        mask = mask & (behind <= (0 if causal else window_right))
    if window_left >= 0:
        mask = mask & (behind >= -window_left)
    mask = mask.unsqueeze(1)
    if slopes is None:
        return mask
    bias = -slopes[..., None, None] * behind.abs().unsqueeze(1)
    return bias.masked_fill(~mask, -torch.inf)


class _Padded:
    """A call as one of dense attention over padded sequences, of which a mask takes the padding.

    Dropout draws the same: a weight's sequence, head, row and column are those of the batch.
    """

    def __init__(
        self, tensors: Sequence[Any], options: Sequence[Any], slopes: Any, extras: Sequence[Any]
    ) -> None:
        query, key, value, cu_seqlens_q, cu_seqlens_k, seed = tensors
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal = options
        window_left, window_right, softcap = extras
        self.rows = _Packing(cu_seqlens_q, max_seqlen_q, query.shape[0])
        self.columns = _Packing(cu_seqlens_k, max_seqlen_k, key.shape[0])
        self.key_heads = key.shape[1]
        self.group = query.shape[1] // max(self.key_heads, 1)
        heads = torch.arange(query.shape[1], device=key.device)
        self.key_head = heads // max(self.group, 1)
        mask = _mask_of_padding(self.rows, self.columns, causal, window_left, window_right, slopes)
        if slopes is not None:
            mask = mask.to(torch.promote_types(query.dtype, torch.float32))
        self.call = Call(
            self.rows.pad(query),
            self.pad_keys(key),
            self.pad_keys(value),
            mask,
            seed,
            dropout_p,
            is_causal=False,
            scale=softmax_scale,
            enable_gqa=False,
            alibi_slopes=None,
            window_left=-1,
            window_right=-1,
            softcap=softcap,
        )

    def pad_keys(self, packed: Tensor) -> Tensor:
        """Key, value or what belongs to one, for each head of the query."""
        return self.columns.pad(packed[:, self.key_head])

    def pack_keys(self, padded: Tensor) -> Tensor:
        """The inverse of :meth:`pad_keys`, the sum over the heads of a group."""
        packed = self.columns.pack(padded)
        return packed.reshape(packed.shape[0], self.key_heads, self.group, packed.shape[-1]).sum(2)

    def second_derivatives(self, upstream: Tensor, directions: Sequence[Tensor]) -> list[Tensor]:
        """Those of :func:`second_derivatives`, of packed tensors, but for the mask's."""
        query, key, value = directions
        padded = Directions(
            self.rows.pad(query), self.pad_keys(key), self.pad_keys(value), attn_mask=None
        )
        of_upstream, query, key, value, _ = second_derivatives(
            self.call, self.rows.pad(upstream), padded
        )
        rows = [self.rows.pack(of_upstream), self.rows.pack(query)]
        return [*rows, self.pack_keys(key), self.pack_keys(value)]

    def output_tangent(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """That of :func:`output_tangent`, of packed tensors."""
        ways = (self.rows.pad, self.pad_keys, self.pad_keys)
        padded = [
            None if tangent is None else pad(tangent)
            for pad, tangent in zip(ways, tangents, strict=True)
        ]
        return self.rows.pack(output_tangent(self.call, [*padded, None]))


def _double_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    upstream, *tensors, slopes = ctx.saved_tensors
    padded = _Padded(tensors, ctx.options, slopes, ctx.extras)
    results = padded.second_derivatives(upstream, gradients)
    return (*results, *(None,) * (len(ctx.needs_input_grad) - len(results)))


def _tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, None, None]:
    """Of the output alone, as gradients are."""
    refuse_derivatives_of_slopes("has a tangent", tangents[12] is not None)
    padded = _Padded(values[:6], values[6:11], values[12], values[13:])
    return padded.output_tangent(tangents[:3]), None, None


def _backward_tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, ...]:
    """As that of dense attention's gradients."""
    refuse_derivatives_of_slopes("has a tangent", tangents[15] is not None)
    padded = _Padded(values[1:7], values[10:15], values[15], values[16:])
    directions = [or_zeros(*each) for each in zip(tangents[1:4], values[1:4], strict=True)]
    _, *results = padded.second_derivatives(values[0], directions)
    if tangents[0] is not None:
        of_upstream = _attention_backward(tangents[0], *values[1:])
        results = [a + b for a, b in zip(results, of_upstream, strict=True)]
    return tuple(results)


def _vmap(
    info: Any, in_dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    operator = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default
    out_dims = (0, 0, 0 if has_residual(arguments[0], arguments[11]) else None)
    return each_slice(operator, info, in_dims, *arguments, out_dims=out_dims)


# Of one sequence each process would have to have all tokens: heads alone are split.
_SHARDED_INPUTS = "query _ h _, key _ ?h _, value _ ?h _"


def _slopes(alibi_slopes: Description | None) -> str:
    return f"alibi_slopes {'h' if alibi_slopes and len(alibi_slopes.shape) == 1 else '_ h'}"


def _sharding(
    query: Description,
    dropout_seed: Description | None,
    keeps_residual: bool,
    alibi_slopes: Description | None,
    **_: Any,
) -> str:
    refuse_distributed_dropout(dropout_seed)
    residual = "_ h _" if has_residual(query, keeps_residual) else "0"
    return f"{_SHARDED_INPUTS}, {_slopes(alibi_slopes)} -> _ h _, h _, {residual}"


def _sharding_backward(
    dropout_seed: Description | None,
    output_residual: Description,
    alibi_slopes: Description | None,
    **_: Any,
) -> str:
    refuse_distributed_dropout(dropout_seed)
    residual = "output_residual _ h _, " if len(output_residual.shape) > 1 else ""
    return (
        f"grad_output _ h _, {_SHARDED_INPUTS}, output _ h _, log_sum_exp h _, {residual}"
        f"{_slopes(alibi_slopes)} -> = query, = key, = value"
    )


register_gradients(
    "scaled_dot_product_attention_varlen_forward",
    _backward,
    tangent=_tangent,
    setup_context=_setup_context,
    keeps="keeps_residual",
)
register_gradients(
    "scaled_dot_product_attention_varlen_backward",
    _double_backward,
    tangent=_backward_tangent,
    setup_context=_setup_double_backward,
)
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    library.impl("scaled_dot_product_attention_varlen", _decomposed, _key)
torch.library.register_vmap("pkg::scaled_dot_product_attention_varlen_forward", _vmap)
torch.library.register_vmap(
    "pkg::scaled_dot_product_attention_varlen_backward",
    partial(each_slice, torch.ops.pkg.scaled_dot_product_attention_varlen_backward.default),
)
for _name in ("scaled_dot_product_attention_varlen", "scaled_dot_product_attention_varlen_forward"):
    register_lower_precision_autocast(_name, keeps=("alibi_slopes",))
register_recording(
    "scaled_dot_product_attention_varlen",
    _record,
    observed_as="scaled_dot_product_attention_varlen_forward",
)
register_below_autograd(
    "scaled_dot_product_attention_varlen",
    "scaled_dot_product_attention_varlen_forward",
    _below_autograd,
)
register_sharding("scaled_dot_product_attention_varlen_forward", _sharding)
register_sharding("scaled_dot_product_attention_varlen_backward", _sharding_backward)
