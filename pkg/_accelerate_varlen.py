"""PyTorch's attention over packed sequences on the CPU, where it has no kernel, by this package's.

``torch.nn.attention.varlen.varlen_attn`` calls ``aten::_flash_attention_forward`` and, for
gradients, ``_flash_attention_backward``. Until attention is switched on the refusal is PyTorch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pkg import _accelerate_routes

_Kernel = Callable[..., Any]

FORWARD = "_flash_attention_forward"
FORWARD_INTO = "_flash_attention_forward_no_dropout_inplace"
BACKWARD = "_flash_attention_backward"
_NAME = "varlen_attn on the CPU, by pkg"
_RNG_STATE = torch.uint64


def kernels() -> Iterator[tuple[str, _Kernel]]:
    """By operator, of those that this PyTorch has, what is called on the CPU."""
    ours: dict[str, _Kernel] = {
        FORWARD: _forward,
        FORWARD_INTO: _forward_into,
        BACKWARD: _backward,
    }
    for name, function in ours.items():
        if hasattr(torch.ops.aten, name):
            yield name, _kernel(function, name, _accelerate_routes.original(name))


def _kernel(ours: _Kernel, name: str, theirs: _Kernel | None) -> _Kernel:
    keys = _accelerate_routes.CPU_KEYS
    operator = BACKWARD if name == BACKWARD else FORWARD
    refuse = _refusal(name) if theirs is None else theirs

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_on = _accelerate_routes.attention_is_on()
        # What our forward pass left, of which PyTorch may have no kernel to make gradients.
        is_of_ours = name == BACKWARD and theirs is None and args[12].dtype == _RNG_STATE
        if not is_on and not is_of_ours:
            return refuse(keys, *args, **kwargs)
        begin = time.perf_counter_ns()
        results = ours(*args, **kwargs)
        if is_on:
            nanoseconds = time.perf_counter_ns() - begin
            _accelerate_routes.count_taken(operator, args[0].dtype, nanoseconds)
        return results

    return kernel


def _refusal(name: str) -> _Kernel:
    """What PyTorch says where it has no kernel; asked before there is one."""
    operator = getattr(torch.ops.aten, name).default
    error = NotImplementedError(f"aten::{name} has no kernel for the CPU")
    with _disable_current_modes():
        values = {"Tensor": torch.empty(0, device="cpu"), "float": 0.0, "bool": False, "int": 0}
        needed = (each for each in operator._schema.arguments if not each.has_default_value())
        try:
            operator(*(values.get(str(each.type)) for each in needed))
        except NotImplementedError as theirs:
            error = theirs
    words = str(error)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(words)

    return refuse


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and three tensors that PyTorch does not use without dropout.

    ``num_splits`` has no effect: no sequence's result depends on the others of its batch.
    """
    _refuse_options(dropout_p, return_debug_mask, alibi_slopes)
    if cum_seq_q is None:
        _refuse(
            "cum_seq_q is None, for sequences of one length: call "
            "torch.nn.functional.scaled_dot_product_attention for these"
        )
    if block_table is not None or seqused_k is not None:
        _refuse_gradients(query, key, value, seqused_k)
        key, value, cum_seq_q, cum_seq_k, max_k = _used_keys(
            key, value, cum_seq_q, cum_seq_k, max_k, seqused_k, block_table
        )
    if cum_seq_k is None:
        _refuse("cum_seq_k is None, which only block_table allows")
    output, log_sum_exp, _ = torch.ops.pkg.scaled_dot_product_attention_varlen_forward.default(
        *(query, key, value, cum_seq_q, cum_seq_k, None),
        *(max_q, max_k, 0.0, scale, is_causal, False),
        window_left=_side(window_size_left),
        window_right=_side(window_size_right),
    )
    # Of a query without any key: what flash-attn says of it.
    log_sum_exp = log_sum_exp.masked_fill_(log_sum_exp == -torch.inf, torch.inf)
    return (
        _laid_out_like(query, output),
        log_sum_exp,
        query.new_zeros(2, dtype=_RNG_STATE),
        query.new_zeros((), dtype=_RNG_STATE),
        query.new_empty(0),
    )


def _forward_into(out: Tensor, query: Tensor, *args: Any, **options: Any) -> Tensor:
    output, log_sum_exp, *_ = _forward(query, *args, **options)
    if out.shape != output.shape or out.dtype != output.dtype:
        _refuse(
            f"out is {out.dtype} of shape {list(out.shape)}; it must be {output.dtype} of shape "
            f"{list(output.shape)}"
        )
    out.copy_(output)
    return log_sum_exp


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_options(dropout_p, False, None)
    logsumexp = logsumexp.masked_fill(logsumexp == torch.inf, -torch.inf)
    gradients = torch.ops.pkg.scaled_dot_product_attention_varlen_backward.default(
        *(grad_out, query, key, value, cum_seq_q, cum_seq_k, None),
        *(out, logsumexp, query.new_empty(0), max_q, max_k, 0.0, scale, is_causal),
        window_left=_side(window_size_left),
        window_right=_side(window_size_right),
    )
    of_query, of_key, of_value = map(_laid_out_like, (query, key, value), gradients)
    return of_query, of_key, of_value


def _used_keys(
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    max_k: int,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Keys, values, both starts and max_k of a call that attends to the first keys alone.

    Those in pages are copied out of them. Others stay where they are: behind each sequence comes
    one that has the keys that are not used, and no query.
    """
    if seqused_k is None:
        _refuse("block_table is given without seqused_k, which says how many keys a sequence has")
    sequences = cum_seq_q.numel() - 1
    if seqused_k.shape != (sequences,) or seqused_k.dtype not in (torch.int32, torch.int64):
        _refuse(
            f"seqused_k is {seqused_k.dtype} of shape {list(seqused_k.shape)}; it must be "
            f"torch.int32 or torch.int64 of shape [{sequences}], a number for each sequence"
        )
    if block_table is not None:
        from .integrations._key_value_cache import out_of_pages

        key, value = out_of_pages(_NAME, key, value, seqused_k, block_table)
        starts = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0))
        return key, value, cum_seq_q, starts, max_k
    if cum_seq_k is None:
        _refuse("cum_seq_k is None, which only block_table allows")
    begins, room = cum_seq_k[:-1].long(), cum_seq_k.diff()
    if len(room) != sequences or bool(((seqused_k < 0) | (seqused_k > room)).any()):
        _refuse(
            f"seqused_k is {seqused_k.tolist()} where cum_seq_k has {room.tolist()} keys; each "
            "must be between 0 and those of its sequence"
        )
    # The keys beyond max_k belong to no sequence, as where all are used.
    both = torch.stack([begins, begins + seqused_k.clamp(max=max_k)], 1).flatten()
    starts = torch.cat([both, cum_seq_k[-1:].long()])
    rows = torch.cat([cum_seq_q[:1], cum_seq_q[1:].repeat_interleave(2)])
    return key, value, rows, starts, max(max_k, key.shape[0])


def _refuse_options(dropout_p: float, return_debug_mask: bool, alibi_slopes: Tensor | None) -> None:
    elsewhere = "pkg.ops.scaled_dot_product_attention_varlen, which has"
    if dropout_p != 0.0:
        _refuse(f"dropout_p is {dropout_p}; it must be 0. Call {elsewhere} dropout")
    if return_debug_mask:
        _refuse("return_debug_mask is True; no weights are kept, so it must be False")
    if alibi_slopes is not None:
        # PyTorch's formula of the gradient forgets them.
        _refuse(f"alibi_slopes are given; they must be None. Call {elsewhere} them and gradients")


def _refuse_gradients(query: Tensor, key: Tensor, value: Tensor, seqused_k: Tensor | None) -> None:
    """PyTorch's formula of the gradient knows neither of the two, and says so after the call."""
    needs = any(each.requires_grad for each in (query, key, value))
    if torch.is_grad_enabled() and needs:
        name = "block_table" if seqused_k is None else "seqused_k"
        raise RuntimeError(f"{name} is an inference-only parameter.")


def _refuse(words: str) -> NoReturn:
    raise RuntimeError(f"{_NAME}: {words}")


def _side(window: int | None) -> int:
    return -1 if window is None else max(window, -1)


def _laid_out_like(tensor: Tensor, result: Tensor) -> Tensor:
    """With the strides that compiled code was told of: those of ``empty_like``.

    They are others where dimensions of the operand are exchanged in memory, and there alone is
    the result copied.
    """
    if tensor.is_contiguous() or tensor.shape != result.shape:
        return result
    like = torch.empty_like(tensor)
    return result if like.stride() == result.stride() else like.copy_(result)
