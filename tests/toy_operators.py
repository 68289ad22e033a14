"""A small correct operator in Python, and the same with one part replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

library = torch.library.Library("toy", "FRAGMENT")
_numbers = count()


def reference(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a * b + c


def forward(a: Tensor, b: Tensor, c: float) -> Tensor:
    if a.dim() > 5:
        raise RuntimeError(f"a must have at most 5 dimensions, but it has {a.dim()}")
    wide = torch.promote_types(torch.result_type(a, b), torch.float32)
    return (a.to(wide) * b.to(wide) + c).to(torch.result_type(a, b))


def fake(a: Tensor, b: Tensor, c: float) -> Tensor:
    return torch.mul(a, b)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = (grad * b).sum_to_size(a.shape).to(a.dtype) if ctx.needs_input_grad[0] else None
    grad_b = (grad * a).sum_to_size(b.shape).to(b.dtype) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None


def with_batch_first(tensor: Tensor, dim: int | None, dims: int) -> Tensor:
    """Batch dimension first, then ones so that the others line up from the right."""
    if dim is None:
        return tensor
    moved = tensor.movedim(dim, 0)
    ones = (1,) * (dims - (moved.dim() - 1))
    return moved.reshape(moved.shape[0], *ones, *moved.shape[1:])


def make(
    *,
    forward: Callable[..., Any] = forward,
    fake: Callable[..., Any] = fake,
    backward: Callable[..., Any] = backward,
    batch_first: Callable[[Tensor, int | None, int], Tensor] = with_batch_first,
    autocast: torch.dtype | None = None,
    differentiable: bool = True,
    forward_mode_refused: bool = True,
    forward_mode_goes_on: bool = True,
    jvp: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Register ``a * b + c`` under a new name, with some of its parts replaced."""
    name = f"muladd_{next(_numbers)}"
    library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
    for device in ("CPU", "CUDA"):
        library.impl(name, forward, device)
    operator: torch._ops.OpOverload = getattr(torch.ops.toy, name).default
    torch.library.register_fake(operator, fake)
    if differentiable:
        kernel = autograd_kernel(
            operator, backward, forward_mode_refused, forward_mode_goes_on, jvp
        )
        library.impl(name, kernel, "Autograd")
    if autocast is not None:
        for device in ("cpu", "cuda"):
            torch.library.register_autocast(operator, device, autocast)

    def vmap(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, c: float
    ) -> tuple[Tensor, int]:
        a_dim, b_dim, _ = in_dims
        dims = max(a.dim() - (a_dim is not None), b.dim() - (b_dim is not None))
        return operator(batch_first(a, a_dim, dims), batch_first(b, b_dim, dims), c), 0

    torch.library.register_vmap(operator, vmap)
    return operator


def autograd_kernel(
    operator: torch._ops.OpOverload,
    backward: Callable[..., Any],
    forward_mode_refused: bool,
    forward_mode_goes_on: bool,
    jvp: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """``torch.library.register_autograd``, but for torch.func too, which that does not serve."""

    class Recorded(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, c: float) -> Tensor:
            ctx.save_for_backward(a, b)
            ctx.save_for_forward(a, b)
            # A level of torch.func below this one records for itself, or refuses.
            with (
                torch.enable_grad(),
                forward_ad._set_fwd_grad_enabled(forward_mode_goes_on),
                torch._C._AutoDispatchBelowAutograd(),
            ):
                return operator(a, b, c)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(ctx, grad)

    if jvp is not None:
        Recorded.jvp = staticmethod(jvp)

    def call(a: Tensor, b: Tensor, c: float) -> Tensor:
        forward_mode = forward_ad._current_level >= 0 and forward_mode_refused
        recording = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if not (forward_mode or recording):
            with torch._C._AutoDispatchBelowAutograd():
                return operator(a, b, c)
        if not torch._C._are_functorch_transforms_active():
            return Recorded.apply(a, b, c)
        with enable_single_level_autograd_function():
            return Recorded.apply(a, b, c)

    return call
