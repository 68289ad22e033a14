"""``scaled_dot_product_attention``: attention without the matrix of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._attention import (
    drawn_seed,
    has_residual,
    new_output,
    refuse_derivatives_of_slopes,
    refuse_distributed_dropout,
)
from ._attention_derivatives import (
    Call,
    Directions,
    leading_shape,
    output_tangent,
    second_derivatives,
)
from ._call import operator, part
from ._forward_mode import or_zeros
from ._registration import (
    check_one_device,
    library,
    one_level_function,
    register_below_autograd,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
    register_recording,
    running,
)
from ._sharding import Description, register_sharding
from ._vmap import batch_to_front, each_slice, vmap_dim_first

_Three = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


TABLE = (
    "what PyTorch's function of that name does, without the matrix of scores; and flash-attn's "
    "windows, capped scores and ALiBi",
    "floating",
    "yes, of masks too",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes ``softmax(query @ key.mT * scale + attn_mask) @ value``.

    The signature and meaning of
    :func:`torch.nn.functional.scaled_dot_product_attention`, by the tiled online
    softmax of FlashAttention-2 (https://arxiv.org/abs/2307.08691): the matrix of
    scores is never held, forward or backward, so memory is O(L + S) for every kind
    of mask and for dropout. Any strides are read in place. Half precision is
    accumulated in float32, and what rounding takes off the output is kept for the
    gradients. A second derivative is O(L S) in memory.

    Args:
        query: Shape (..., L, E); float16, bfloat16, float32 or float64.
        key: Shape (..., S, E), of the same dtype and device. Leading dimensions
            broadcast.
        value: Shape (..., S, Ev), likewise.
        attn_mask: A shape that broadcasts to (..., L, S). Boolean: True where a key
            takes part. Numbers, of ``query``'s dtype or float32: added to the
            scaled scores; they may require grad. Not together with ``is_causal``.
        dropout_p: Probability with which a weight is dropped; the others are
            divided by ``1 - dropout_p``. Drawn from PyTorch's generator, so that
            :func:`torch.manual_seed` reproduces it. Always applied: pass 0 to
            evaluate.
        is_causal: Query i sees keys 0 to i alone.
        scale: Factor of the scores; ``1 / sqrt(E)`` by default.
        enable_gqa: Key and value have fewer heads (dimension -3) than the query,
            each shared by as many neighbouring query heads.
        window_left: How many keys before its own a query sees; -1: all. A query's own
            key is counted from the end: of L queries and S keys, query i sees the keys
            from i + S - L - window_left to i + S - L + window_right alone, flash-attn's
            meaning (https://github.com/Dao-AILab/flash-attention). Keys that no query of
            a block sees are not computed, so that the cost is that of the window; NaN in
            them need not show. With ``is_causal`` or ``attn_mask`` a query sees the keys
            that each of them lets it see.
        window_right: How many keys behind its own a query sees; -1: all. 0 alone is
            causality that is aligned to the last key.
        softcap: Scores, scaled, become ``softcap * tanh(score / softcap)`` before masks
            (https://arxiv.org/abs/2408.00118, section 2); 0: they stay as they are.
        alibi_slopes: Shape (heads,) or (batch, heads), or any that broadcasts to the
            leading dimensions of the result; float32 or ``query``'s dtype. To the scores
            ``-slope * |i + S - L - j|`` is added (https://arxiv.org/abs/2108.12409), behind
            the cap. It may not require grad.

    Returns:
        Shape (..., L, Ev). A query without any key gets zeros. Where ``query`` is a
        transposed view of (..., L, heads, E) the result is one too, and contiguous
        otherwise.

    Raises:
        RuntimeError: Shapes do not fit or broadcast, dtypes or devices differ or
            are not supported, ``dropout_p`` is no probability, ``attn_mask`` is given
            together with ``is_causal``, a side of the window is less than -1, ``softcap``
            is negative or not finite, or ``alibi_slopes`` requires grad.

    Example:
        >>> value = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> query = key = torch.zeros(2, 4)
        >>> scaled_dot_product_attention(query, key, value)
        tensor([[2., 4.],
                [2., 4.]])
        >>> scaled_dot_product_attention(query, key, value, is_causal=True)
        tensor([[1., 2.],
                [2., 4.]])
        >>> scaled_dot_product_attention(query, key, value, window_left=0, window_right=0)
        tensor([[1., 2.],
                [3., 6.]])
    """
    return torch.ops.pkg.scaled_dot_product_attention.default(
        *(query, key, value, attn_mask, dropout_p, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def _record(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The same with the dispatcher left out: without a seed to draw it is the forward operator."""
    output: Tensor
    if dropout_p == 0.0:
        output = _recorded(
            *(query, key, value, attn_mask, is_causal, scale, enable_gqa),
            *(alibi_slopes, window_left, window_right, softcap),
        )
    else:
        output = torch.ops.pkg.scaled_dot_product_attention.default(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
    return output


_attention_backward: Callable[..., _Four] = part("scaled_dot_product_attention_backward")


def _check_mask(attn_mask: Tensor, scores: tuple[int, ...], is_causal: bool) -> None:
    """For the fake kernel: the mask broadcasts to the scores, and there is no other one."""
    torch._check(
        not is_causal,
        lambda: (
            "scaled_dot_product_attention: attn_mask and is_causal=True exclude each other; put "
            "the causal mask into attn_mask"
        ),
    )
    fits = attn_mask.dim() <= len(scores) and all(
        size == full or size == 1  # in this order: an unknown size is its own equal
        for size, full in zip(attn_mask.shape[::-1], scores[::-1], strict=False)
    )
    *lead, rows, columns = scores
    torch._check(
        fits,
        lambda: (
            f"scaled_dot_product_attention: attn_mask of shape {tuple(attn_mask.shape)} does not "
            f"broadcast to the scores: leading dimensions {tuple(lead)}, {rows} rows, {columns} "
            "columns"
        ),
    )


@register_fake("scaled_dot_product_attention_forward")
def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    keeps_residual: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> _Three:
    tensors = (query, key, value, attn_mask, dropout_seed, alibi_slopes)
    check_one_device("scaled_dot_product_attention", *(t for t in tensors if t is not None))
    torch._check(
        min(query.dim(), key.dim(), value.dim()) >= 2,
        lambda: (
            "scaled_dot_product_attention: query, key and value need at least two dimensions "
            "(..., length, head size)"
        ),
    )
    torch._check(
        query.shape[-1] == key.shape[-1], lambda: "query and key differ in their last dimension"
    )
    torch._check(key.shape[-2] == value.shape[-2], lambda: "key and value differ in length")
    lead = leading_shape(query, key, value, enable_gqa)
    if attn_mask is not None:
        _check_mask(attn_mask, (*lead, query.shape[-2], key.shape[-2]), is_causal)
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = new_output(query, lead, value.shape[-1])
    return (
        output,
        query.new_empty((*lead, query.shape[-2]), dtype=dtype),
        torch.empty_like(output) if has_residual(query, keeps_residual) else query.new_empty((0,)),
    )


@register_fake("scaled_dot_product_attention_backward")
def _fake_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needs_mask_grad: bool,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> _Four:
    tensors = (grad_output, query, key, value, attn_mask, dropout_seed, output, log_sum_exp)
    check_one_device(
        "scaled_dot_product_attention_backward",
        *(t for t in (*tensors, output_residual, alibi_slopes) if t is not None),
    )
    if needs_mask_grad and attn_mask is not None:
        grad_mask = attn_mask.new_empty(attn_mask.shape)
    else:
        grad_mask = query.new_empty((0,))
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        grad_mask,
    )


@register_fake("attention_dropout_mask")
def _fake_dropout_mask(
    seed: Tensor, batch: int, rows: int, columns: int, dropout_p: float
) -> Tensor:
    return seed.new_empty((batch, rows, columns), dtype=torch.bool)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Three) -> None:
    *tensors, dropout_p, is_causal, scale, enable_gqa, _, slopes = inputs[:11]
    refuse_derivatives_of_slopes("requires a gradient", ctx.needs_input_grad[10])
    ctx.save_for_backward(*tensors, *output, slopes)
    ctx.options = (dropout_p, is_causal, scale, enable_gqa)
    ctx.extras = inputs[11:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and the mask that are asked for."""
    *tensors, slopes = ctx.saved_tensors
    options = (*ctx.options, ctx.needs_input_grad[3], slopes, *ctx.extras)
    gradients = _attention_backward(grad, *tensors, *options)
    needed = ctx.needs_input_grad[:4]
    return (
        *(g if need else None for g, need in zip(gradients, needed, strict=True)),
        *(None,) * (len(ctx.needs_input_grad) - 4),
    )


def _forward_without_dropout(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    alibi_slopes: Tensor | None,
    *extras: float,
) -> Tensor:
    """Returns the output alone: two more outputs and their gradients of zero take a while."""
    refuse_derivatives_of_slopes("requires a gradient", ctx.needs_input_grad[7])
    results: _Three = _run_forward(
        *(query, key, value, attn_mask, None, 0.0, is_causal, scale, enable_gqa, True),
        *(alibi_slopes, *extras),
    )
    ctx.save_for_backward(query, key, value, attn_mask, None, *results, alibi_slopes)
    ctx.options = (0.0, is_causal, scale, enable_gqa)
    ctx.extras = extras
    return results[0]


def _setup_double_backward(ctx: Any, inputs: tuple[Any, ...], output: _Four) -> None:
    refuse_derivatives_of_slopes("requires a gradient", ctx.needs_input_grad[14])
    ctx.save_for_backward(*inputs[:6], inputs[14])
    ctx.options = inputs[9:14]
    ctx.extras = inputs[15:]


def _double_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    upstream, query, key, value, mask, seed, slopes = ctx.saved_tensors
    *options, needs_mask_grad = ctx.options
    call = Call._make((query, key, value, mask, seed, *options, slopes, *ctx.extras))
    grad_mask = gradients[3] if needs_mask_grad else None
    results = second_derivatives(call, upstream, Directions._make((*gradients[:3], grad_mask)))
    return (
        *results[:4],
        results[4] if ctx.needs_input_grad[4] else None,
        *(None,) * (len(ctx.needs_input_grad) - 5),
    )


def _tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, None, None]:
    """Of the output alone, as gradients are."""
    refuse_derivatives_of_slopes("has a tangent", tangents[10] is not None)
    call = Call._make((*values[:9], *values[10:]))
    return output_tangent(call, tangents[:4]), None, None


def _backward_tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, ...]:
    """What depends on the inputs through output and log-sum-exp is counted with the inputs."""
    refuse_derivatives_of_slopes("has a tangent", tangents[14] is not None)
    needs_mask_grad, slopes, *extras = values[13:]
    call = Call._make((*values[1:6], *values[9:13], slopes, *extras))
    directions = Directions._make((*map(or_zeros, tangents[1:4], values[1:4]), tangents[4]))
    results: list[Any] = [*second_derivatives(call, values[0], directions)[1:]]
    if not needs_mask_grad:
        results[3] = outputs[3]  # without elements
    if tangents[0] is not None:
        of_upstream = _attention_backward(tangents[0], *values[1:])
        results = [a + b for a, b in zip(results, of_upstream, strict=True)]
    return tuple(results)


def _decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The composite operator: draws the seed, under vmap as ``randomness`` says.

    In Python, since exceptions of Python's become mere words in an operator of C++: Ctrl-C, and
    what ends a checkpoint's recomputation.
    """
    seed = drawn_seed(query, dropout_p)
    forward = torch.ops.pkg.scaled_dot_product_attention_forward.default
    output: Tensor = forward(
        *(query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa, False),
        *(alibi_slopes, window_left, window_right, softcap),
    )[0]
    return output


def _below_autograd(
    enter: Callable[..., _Three],
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The same of tensors whose kernel may be entered."""
    seed = drawn_seed(query, dropout_p)
    return enter(
        *(keys, query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa),
        *(False, alibi_slopes, window_left, window_right, softcap),
    )[0]


_NO_EXTRAS = (None, -1, -1, 0.0)


def _with_defaults(
    in_dims: Sequence[int | None], arguments: Sequence[Any], count: int
) -> tuple[Sequence[int | None], tuple[Any, ...]]:
    """The arguments, of which the dispatcher leaves out those at the end that are defaults."""
    missing = count - len(arguments)
    return (*in_dims, *(None,) * missing), (*arguments, *_NO_EXTRAS[4 - missing :])


def _slopes_to_front(slopes: Tensor | None, dim: int | None, like: Tensor) -> Tensor | None:
    """ALiBi's slopes with the vmap dimension where the operator's ``query`` has it, the first."""
    if slopes is None or dim is None:
        return slopes
    (laid_out,) = batch_to_front([slopes], [dim])
    missing = like.dim() - 2 - laid_out.dim()
    return laid_out.reshape(laid_out.shape[:1] + (1,) * missing + laid_out.shape[1:])


def _vmap(
    info: Any, in_dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    operator = torch.ops.pkg.scaled_dot_product_attention_forward.default
    in_dims, arguments = _with_defaults(in_dims, arguments, 14)
    query, key, value, mask, seed, *options, slopes, left, right, softcap = arguments
    out_dims = (0, 0, 0 if has_residual(query, options[-1]) else None)
    if seed is not None:
        # The mask that a slice draws depends on its place in its own batch.
        return each_slice(operator, info, in_dims, *arguments, out_dims=out_dims)
    query = vmap_dim_first(query, in_dims[0], info.batch_size)
    tensors = [query, key, value] + [mask] * (mask is not None)
    query, key, value, *masks = batch_to_front(tensors, [0, *in_dims[1 : len(tensors)]])
    slopes = _slopes_to_front(slopes, in_dims[10], query)
    return (
        operator(
            *(query, key, value, *(masks if masks else (None,)), None, *options),
            *(slopes, left, right, softcap),
        ),
        out_dims,
    )


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    operator = torch.ops.pkg.scaled_dot_product_attention_backward.default
    in_dims, arguments = _with_defaults(in_dims, arguments, 18)
    grad, query, key, value, mask, seed, output, log_sum_exp, residual, *options = arguments
    *options, slopes, left, right, softcap = options
    needs_mask_grad = options[-1]
    out_dims = (0, 0, 0, 0 if needs_mask_grad else None)
    if seed is not None:
        return each_slice(operator, info, in_dims, *arguments, out_dims=out_dims)
    batched = [
        vmap_dim_first(tensor, dim, info.batch_size)
        for tensor, dim in zip((query, key, value), in_dims[1:4], strict=True)
    ]
    if mask is not None:
        batched.append(vmap_dim_first(mask, in_dims[4], info.batch_size))
    query, key, value, *masks = batch_to_front(batched, [0] * len(batched))
    grad, output, log_sum_exp = (
        vmap_dim_first(tensor, dim, info.batch_size)
        for tensor, dim in ((grad, in_dims[0]), (output, in_dims[6]), (log_sum_exp, in_dims[7]))
    )
    if residual.dim() > 1:  # not the empty one
        residual = vmap_dim_first(residual, in_dims[8], info.batch_size)
    gradients = operator(
        *(grad, query, key, value, *(masks if masks else (None,)), None),
        *(output, log_sum_exp, residual, *options),
        *(_slopes_to_front(slopes, in_dims[14], query), left, right, softcap),
    )
    # Without the ones that were put in to line the dimensions up.
    kept = [
        gradient if dim is None else gradient.reshape(tensor.shape)
        for gradient, tensor, dim in zip(
            gradients, [*batched, query][: len(gradients)], out_dims, strict=False
        )
    ]
    return (*kept, *gradients[len(kept) :]), out_dims


_SHARDED_INPUTS = ", ".join(f"{name} ... _ _" for name in ("query", "key", "value", "attn_mask"))


def _sharding(
    query: Description, dropout_seed: Description | None, keeps_residual: bool, **_: Any
) -> str:
    refuse_distributed_dropout(dropout_seed)
    residual = "... _ _" if has_residual(query, keeps_residual) else "0"
    return f"{_SHARDED_INPUTS}, alibi_slopes ... -> ... _ _, ... _, {residual}"


def _sharding_backward(
    attn_mask: Description | None,
    dropout_seed: Description | None,
    output_residual: Description,
    needs_mask_grad: bool,
    **_: Any,
) -> str:
    refuse_distributed_dropout(dropout_seed)
    residual = "output_residual ... _ _, " if len(output_residual.shape) > 1 else ""
    mask = "= attn_mask" if needs_mask_grad and attn_mask is not None else "0"
    return (
        f"grad_output ... _ _, {_SHARDED_INPUTS}, output ... _ _, log_sum_exp ... _, {residual}"
        f"alibi_slopes ... -> = query, = key, = value, {mask}"
    )


register_gradients(
    "scaled_dot_product_attention_forward",
    _backward,
    tangent=_tangent,
    setup_context=_setup_context,
    keeps="keeps_residual",
)
_run_forward = running("scaled_dot_product_attention_forward")
_recorded = one_level_function("scaled_dot_product_attention", _forward_without_dropout, _backward)
register_gradients(
    "scaled_dot_product_attention_backward",
    _double_backward,
    tangent=_backward_tangent,
    setup_context=_setup_double_backward,
)
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    library.impl("scaled_dot_product_attention", _decomposed, _key)
torch.library.register_vmap("pkg::scaled_dot_product_attention_forward", _vmap)
torch.library.register_vmap("pkg::scaled_dot_product_attention_backward", _vmap_backward)
torch.library.register_vmap(
    "pkg::attention_dropout_mask", partial(each_slice, torch.ops.pkg.attention_dropout_mask.default)
)
for _name in ("scaled_dot_product_attention", "scaled_dot_product_attention_forward"):
    register_lower_precision_autocast(_name, keeps=("alibi_slopes",))
register_recording(
    "scaled_dot_product_attention", _record, observed_as="scaled_dot_product_attention_forward"
)
register_below_autograd(
    "scaled_dot_product_attention", "scaled_dot_product_attention_forward", _below_autograd
)
register_sharding("scaled_dot_product_attention_forward", _sharding)
register_sharding("scaled_dot_product_attention_backward", _sharding_backward)
