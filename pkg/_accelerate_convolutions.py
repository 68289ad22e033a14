"""Convolutions in half precision by PyTorch's kernels of float32, under :func:`pkg.accelerate`.

Where oneDNN has no convolution of a dtype for a processor, float16 without AVX512-FP16 or bfloat16
without AVX-512, PyTorch unfolds the images and multiplies them by a loop of its own. On a Zen 4
(2026-11-24, PyTorch 2.13, one thread) the 16 x 16 patches of an image of 224 x 224 took 47 ms so,
of a step of 84 ms. Converted to float32, convolved by oneDNN and rounded once, they take 2 to 4 ms,
and are more exact. Autograd sits above: the operators here are those of the unfolding way.

They serve small convolutions of one image in float32 too, which then take 4 us more, PyTorch's way
to a Python kernel and back; so they are registered only where a dtype needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._accelerate_counts import Route

OPERATORS = ("_slow_conv2d_forward", "_slow_conv2d_backward.output_mask")

_HALVES = (torch.float16, torch.bfloat16)
# Below so many multiplications conversions take longer than what they save.
_LEAST_WORK = 1 << 18

# In a report.
_NAME = "conv2d"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_Kernel = Callable[..., Any]
_Gradients = tuple[Tensor | None, ...]
_Sizes = Sequence[int]

route = Route()


def is_needed() -> bool:
    """Whether there is a dtype of half precision without a convolution of oneDNN's here."""
    asked = ("_is_mkldnn_fp16_supported", "_is_mkldnn_bf16_supported")
    return not all(hasattr(torch.ops.mkldnn, name) for name in asked) or not all(
        getattr(torch.ops.mkldnn, name)() for name in asked
    )


def kernels(original: Callable[[str], _Kernel | None]) -> Iterator[tuple[str, _Kernel]]:
    """By operator a kernel that goes by float32, or else calls PyTorch's.

    Args:
        original: PyTorch's CPU kernel by an operator's name, which takes a key set first.
    """
    for name, make in zip(OPERATORS, (_forward_kernel, _backward_kernel), strict=True):
        theirs = original(name)
        if theirs is not None and is_needed():
            yield name, make(theirs)


def _forward_kernel(theirs: _Kernel) -> _Kernel:
    def kernel(
        images: Tensor,
        weight: Tensor,
        kernel_size: _Sizes,
        bias: Tensor | None,
        stride: _Sizes,
        padding: _Sizes,
    ) -> Tensor:
        if images.dtype not in _HALVES:
            return theirs(_KEYS, images, weight, kernel_size, bias, stride, padding)  # type: ignore[no-any-return]

        def by_float32() -> Tensor:
            result: Tensor = torch.ops.aten.convolution(
                *(images.float(), weight.float(), None if bias is None else bias.float()),
                *(stride, padding, (1, 1), False, (0, 0), 1),
            )
            return result.to(images.dtype)

        def by_pytorch() -> Tensor:
            return theirs(_KEYS, images, weight, kernel_size, bias, stride, padding)  # type: ignore[no-any-return]

        tensors = (images, weight) if bias is None else (images, weight, bias)
        taken = _is_taken(tensors, images, weight, stride, padding)
        return route.run(_NAME, images.dtype, taken, by_float32 if taken else by_pytorch)

    return kernel


def _backward_kernel(theirs: _Kernel) -> _Kernel:
    def kernel(
        grad_output: Tensor,
        images: Tensor,
        weight: Tensor,
        kernel_size: _Sizes,
        stride: _Sizes,
        padding: _Sizes,
        output_mask: Sequence[bool],
    ) -> _Gradients:
        tensors = (grad_output, images, weight)
        if images.dtype not in _HALVES:
            return theirs(_KEYS, *tensors, kernel_size, stride, padding, output_mask)  # type: ignore[no-any-return]

        def by_float32() -> _Gradients:
            results = torch.ops.aten.convolution_backward(
                *(each.float() for each in tensors),
                *([weight.size(0)], stride, padding, (1, 1), False, (0, 0), 1, output_mask),
            )
            # oneDNN computes the gradients of weight and bias together.
            return tuple(
                each.to(images.dtype) if wanted else None
                for each, wanted in zip(results, output_mask, strict=True)
            )

        def by_pytorch() -> _Gradients:
            return theirs(_KEYS, *tensors, kernel_size, stride, padding, output_mask)  # type: ignore[no-any-return]

        taken = _is_taken(tensors, images, weight, stride, padding)
        name = f"{_NAME}_backward"
        return route.run(name, images.dtype, taken, by_float32 if taken else by_pytorch)

    return kernel


def _is_taken(
    tensors: Sequence[Tensor], images: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes
) -> bool:
    return (
        route.is_on
        and all(each.dtype is images.dtype and each.ndim > 0 for each in tensors)
        and _work(images, weight, stride, padding) >= _LEAST_WORK
    )


def _work(images: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes) -> int:
    """Multiplications; 0 of what PyTorch refuses, or leaves empty."""
    if images.ndim != 4 or weight.ndim != 4 or images.size(1) != weight.size(1):
        return 0
    sizes = zip(images.shape[2:], padding, weight.shape[2:], stride, strict=True)
    places = [(size + 2 * pad - width) // step + 1 for size, pad, width, step in sizes]
    return 0 if min(places) <= 0 else images.size(0) * math.prod(places) * weight.numel()
