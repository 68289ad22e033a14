"""``add_out``: a sum written into a tensor of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._forward_mode import have_tangents
from ._registration import check_one_device, in_words, library, records_gradients, register_fake
from ._sharding import register_sharding
from ._vmap import batch_to_front, promoted_for_vmap

TABLE = ("writes `a + b` into `out`", "floating, integers, bool", "no")
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes ``a + b`` into ``out``.

    Args:
        a: Any shape; bool, an integer dtype, float16, bfloat16, float32 or float64.
        b: A shape that broadcasts with ``a``'s, on the same device.
        out: The broadcast shape, any strides without overlap, and a dtype that
            the promoted dtype of the sum can be cast to. It may be ``a`` or
            ``b`` itself, or lie interleaved with them in one storage, but not
            share only some of their elements.

    Raises:
        RuntimeError: ``out`` has another shape or a dtype of a lower category,
            overlaps itself or in part an input, the shapes do not broadcast, a
            dtype is not supported, the devices differ, a tensor requires a
            gradient while gradients are recorded, or has a tangent of forward
            mode: there is neither for ``out=``; ``out`` is an inference tensor
            and inference mode is off.

    Example:
        >>> out = torch.empty(2)
        >>> add_out(torch.tensor([1.0, 2.0]), torch.tensor(10.0), out=out)
        >>> out
        tensor([11., 12.])
    """
    torch.ops.pkg.add_out.default(a, b, out)


@register_fake("add_out")
def _fake(a: Tensor, b: Tensor, out: Tensor) -> None:
    check_one_device("add_out", a, b, out)


def _refuse_inference_tensor(out: Tensor) -> None:
    """As PyTorch does, outside of inference mode."""
    is_inference = isinstance(out, Tensor) and out.is_inference()
    if is_inference and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "add_out: out is an inference tensor and inference mode is off, where writing to it "
            "is not allowed; call it within torch.inference_mode(), or give a clone of out"
        )


def _refuse_derivatives(a: Tensor, b: Tensor, out: Tensor) -> None:
    _refuse_inference_tensor(out)
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if records_gradients((tensor,)):
            raise RuntimeError(
                f"add_out: {name} requires a gradient, which writing into out cannot record. "
                "Use torch.add, or call it under torch.no_grad()"
            )
        if have_tangents((tensor,)):
            raise RuntimeError(
                f"add_out: {name} has a tangent of forward mode, which writing into out would "
                "lose. Use torch.add"
            )
    with torch._C._AutoDispatchBelowAutograd():
        add_out(a, b, out)


def _count_write(a: Tensor, b: Tensor, out: Tensor) -> None:
    _refuse_inference_tensor(out)
    try:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            add_out(a, b, out)
    except RuntimeError as error:
        raise in_words("add_out", error, (a, b, out)) from error.__cause__
    # Autograd must notice where a tensor that it saved is overwritten.
    torch.autograd.graph.increment_version(out)


def _resolve_negation(a: Tensor, b: Tensor, out: Tensor) -> None:
    """PyTorch's own way wants what is written to be returned."""
    a, b = a.resolve_neg(), b.resolve_neg()
    written = torch.empty(out.shape, dtype=out.dtype, device=out.device) if out.is_neg() else out
    add_out(a, b, written)
    if written is not out:
        out.copy_(written)


def _vmap(
    info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, out: Tensor
) -> tuple[None, None]:
    if in_dims[2] is None:
        raise RuntimeError(
            "add_out: under vmap an input has a batch dimension and out has none to hold the "
            "results; pass an out that is mapped over too"
        )
    slices = [
        each.shape if dim is None else (*each.shape[:dim], *each.shape[dim + 1 :])
        for each, dim in zip((a, b, out), in_dims, strict=True)
    ]
    summed = torch.broadcast_shapes(*slices[:2])
    if tuple(slices[2]) != tuple(summed):
        raise RuntimeError(
            f"add_out: under vmap out has shape {tuple(slices[2])} but a and b broadcast to "
            f"{tuple(summed)}"
        )
    a, b = promoted_for_vmap(a, b, in_dims[:2])
    a, b, out = batch_to_front((a, b, out), in_dims)
    # Where neither input has the batch dimension, their sum is every slice's.
    add_out(a.expand_as(out), b, out)
    return None, None


library.impl("add_out", _refuse_derivatives, "Autograd")
library.impl("add_out", _count_write, "ADInplaceOrView")
library.impl("add_out", _resolve_negation, "Negative")
torch.library.register_vmap("pkg::add_out", _vmap)
register_sharding("add_out", "a ..., b ..., out ... ->")
