"""``add_out``: a sum written into a tensor of the caller's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from ._registration import (
    batch_to_front,
    check_one_device,
    library,
    promoted_for_vmap,
    register_fake,
)


def add_out(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Writes ``a + b`` into ``out``.

    Args:
        a: Any shape; bool, an integer dtype, float16, bfloat16, float32 or float64.
        b: A shape that broadcasts with ``a``'s, on the same device.
        out: The broadcast shape, any strides without overlap, and a dtype that
            the promoted dtype of the sum can be cast to. It may be ``a`` or
            ``b`` itself, but not share only a part of its memory with them.

    Raises:
        RuntimeError: ``out`` has another shape or a dtype of a lower category,
            overlaps itself or in part an input, the shapes do not broadcast, a
            dtype is not supported, the devices differ, or a tensor requires a
            gradient while gradients are recorded: there is none for ``out=``.

    Example:
        >>> out = torch.empty(2)
        >>> add_out(torch.tensor([1.0, 2.0]), torch.tensor(10.0), out=out)
        >>> out
        tensor([11., 12.])
    """
    torch.ops.pkg.add_out.default(a, b, out=out)


@register_fake("add_out")
def _fake(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    check_one_device("add_out", a, b, out)


def _refuse_gradients(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    if torch.is_grad_enabled():
        for name, tensor in (("a", a), ("b", b), ("out", out)):
            if tensor.requires_grad:
                raise RuntimeError(
                    f"add_out: {name} requires a gradient, which writing into out cannot record. "
                    "Use torch.add, or call it under torch.no_grad()"
                )
    with torch._C._AutoDispatchBelowAutograd():
        add_out(a, b, out=out)


def _count_write(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    # Autograd must notice where a tensor that it saved is overwritten.
    torch.autograd.graph.increment_version(out)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        add_out(a, b, out=out)


def _vmap(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    # torch.library.register_vmap does not take operators with keyword-only tensors.
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    (a, a_dim), (b, b_dim), (out, out_dim) = (
        torch._C._functorch._unwrap_batched(t, level) for t in (a, b, out)
    )
    if out_dim is None and (a_dim, b_dim) != (None, None):
        raise RuntimeError(
            "add_out: under vmap an input has a batch dimension and out has none to hold the "
            "results; pass an out that is mapped over too"
        )
    with torch._C._ExcludeDispatchKeyGuard(_VMAP_KEYS):
        if out_dim is None:
            return add_out(a, b, out=out)
        a, b = promoted_for_vmap(a, b, (a_dim, b_dim))
        a, b, out = batch_to_front((a, b, out), (a_dim, b_dim, out_dim))
        # Where neither input has the batch dimension, their sum is every slice's.
        return add_out(a.expand_as(out), b, out=out)


_VMAP_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)

library.impl("add_out", _refuse_gradients, "Autograd")
library.impl("add_out", _count_write, "ADInplaceOrView")
library.impl("add_out", _vmap, "FuncTorchBatched")
