"""``spatial_correlation_sample``: the correlation layer of FlowNet, a cost volume of two images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator, part
from ._forward_mode import linear_in
from ._registration import (
    check_one_device,
    register_fake,
    register_gradients,
    register_lower_precision_autocast,
)
from ._sharding import register_sharding
from ._vmap import vmap_dim_first

TABLE = (
    "the correlation layer of FlowNet, a cost volume, with the parameters of "
    "spatial-correlation-sampler",
    "floating",
    "yes, to any order",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def spatial_correlation_sample(
    input1: Tensor,
    input2: Tensor,
    kernel_size: int | tuple[int, int] = 1,
    patch_size: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    dilation_patch: int | tuple[int, int] = 1,
) -> Tensor:
    """Correlates each pixel of one image with those in a patch around it in another image.

    The correlation layer of FlowNet (Dosovitskiy and others, https://arxiv.org/abs/1504.06852),
    with the parameters and the output of the package spatial-correlation-sampler. Output element
    (b, ph, pw, h, w) is the sum over channels c and places (ki, kj) of the kernel window of
    ``input1[b, c, i, j] * input2[b, c, i + sh, j + sw]``, where
    ``i = -padding + h * stride + ki * dilation`` and
    ``sh = (ph - (patch_size - 1) // 2) * dilation_patch``, likewise in width. A term with either
    pixel outside its image is zero. Nothing is normalised: :class:`pkg.nn.FlattenedCorrelation`
    gives the layout and the mean of NVIDIA's layer.

    Any strides are read at full speed, channels-last ones too. Half precision is accumulated in
    float32. The gradients are gathered in an order that does not depend on threads, without
    atomics: bits repeat. Differentiable as often as wanted.

    Args:
        input1: Shape (B, C, H, W); float16, bfloat16, float32 or float64.
        input2: The same shape, dtype and device.
        kernel_size: Of the window that is summed at each position; as all that follow, a number or
            a pair of height and width.
        patch_size: How many shifts are tried; of an even size one more forward than backward.
        stride: From one position to the next in ``input1``.
        padding: Positions begin so many pixels before the image and end so many after it.
        dilation: Between the pixels of the window.
        dilation_patch: Between shifts, in pixels.

    Returns:
        Shape (B, patch height, patch width, oH, oW), contiguous, with
        ``oH = (H + 2 * padding - (kernel_size - 1) * dilation - 1) // stride + 1``.

    Raises:
        RuntimeError: Shapes, dtypes or devices differ or are not supported, a parameter is too
            small or no pair, or the window is larger than the padded image.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0, 3.0]]]])
        >>> spatial_correlation_sample(image, image, patch_size=(1, 3)).view(3, 3)
        tensor([[0., 2., 6.],
                [1., 4., 9.],
                [2., 6., 0.]])
    """
    given = (kernel_size, patch_size, stride, padding, dilation, dilation_patch)
    return torch.ops.pkg.spatial_correlation_sample.default(
        input1, input2, *(_pair_of(value) for value in given)
    )


_gradient = part("spatial_correlation_sample_backward")


def _pair_of(value: int | Sequence[int]) -> Sequence[int]:
    return value if isinstance(value, Sequence) else (value, value)


_OPTIONS = ("kernel_size", "patch_size", "stride", "padding", "dilation", "dilation_patch")


def _check_pair(name: str, option: str, values: Sequence[int]) -> None:
    torch._check(
        len(values) == 2,
        lambda: (
            f"{name}: {option} has {len(values)} elements; it must be a number or a pair, of "
            "height and width"
        ),
    )
    least, most = 0 if option == "padding" else 1, 2**30 - 1
    torch._check(
        all(least <= value <= most for value in values),
        lambda: (
            f"{name}: {option} is {tuple(values)}; it must be at least {least} and at most {most}"
        ),
    )


def _output_shape(name: str, images: Tensor, options: Sequence[Sequence[int]]) -> list[int]:
    for option, values in zip(_OPTIONS, options, strict=True):
        _check_pair(name, option, values)
    kernel, patch, stride, padding, dilation, _ = options
    shape = [images.shape[0], *patch]
    for axis in range(2):
        window = (kernel[axis] - 1) * dilation[axis] + 1
        padded = images.shape[2 + axis] + 2 * padding[axis]
        torch._check(
            padded >= window,
            lambda: f"{name}: the kernel covers more than the padded image",
        )
        shape.append((padded - window) // stride[axis] + 1)
    return shape


@register_fake("spatial_correlation_sample")
def _fake(
    input1: Tensor,
    input2: Tensor,
    kernel_size: Sequence[int] = (1, 1),
    patch_size: Sequence[int] = (1, 1),
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    dilation_patch: Sequence[int] = (1, 1),
) -> Tensor:
    check_one_device("spatial_correlation_sample", input1, input2)
    torch._check(
        input1.dim() == 4 and input1.shape == input2.shape,
        lambda: "spatial_correlation_sample: the inputs must have one shape, of four dimensions",
    )
    options = (kernel_size, patch_size, stride, padding, dilation, dilation_patch)
    return input1.new_empty(_output_shape("spatial_correlation_sample", input1, options))


@register_fake("spatial_correlation_sample_backward")
def _fake_backward(grad: Tensor, other: Tensor, of_input2: bool, *options: Sequence[int]) -> Tensor:
    name = "spatial_correlation_sample_backward"
    check_one_device(name, grad, other)
    torch._check(other.dim() == 4, lambda: f"{name}: other must have four dimensions")
    torch._check(
        list(grad.shape) == _output_shape(name, other, options),
        lambda: f"{name}: grad does not have the output's shape",
    )
    return other.new_empty(other.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    of_input1, of_input2 = ctx.needs_input_grad[:2]
    ctx.save_for_backward(inputs[0] if of_input2 else None, inputs[1] if of_input1 else None)
    ctx.options = inputs[2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input1, input2 = ctx.saved_tensors
    return (
        _gradient(grad, input2, False, *ctx.options) if ctx.needs_input_grad[0] else None,
        _gradient(grad, input1, True, *ctx.options) if ctx.needs_input_grad[1] else None,
        *(None,) * len(ctx.options),
    )


def _setup_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.of_input2 = inputs[2]
    ctx.options = inputs[3:]


def _double_backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
    # The gradient of one input, times any tensor in that input's place, is grad times the
    # correlation of that tensor with the other input; and that is linear in both.
    grad, other = ctx.saved_tensors
    grad_of_grad = grad_of_other = None
    if ctx.needs_input_grad[0]:
        images = (other, grad_grad) if ctx.of_input2 else (grad_grad, other)
        grad_of_grad = spatial_correlation_sample(*images, *ctx.options)
    if ctx.needs_input_grad[1]:
        grad_of_other = _gradient(grad, grad_grad, not ctx.of_input2, *ctx.options)
    return grad_of_grad, grad_of_other, *(None,) * (1 + len(ctx.options))


def _as_one_batch(
    operator: Callable[..., Tensor],
    info: Any,
    in_dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    options: Sequence[Any],
) -> Tensor:
    """Calls an operator with the vmap dimension and the batch of two tensors as one dimension."""
    first, second = (
        vmap_dim_first(tensor, dim, info.batch_size)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    )
    result = operator(first.flatten(0, 1), second.flatten(0, 1), *options)
    return result.unflatten(0, first.shape[:2])


def _vmap(
    info: Any, in_dims: Sequence[int | None], input1: Tensor, input2: Tensor, *options: Any
) -> tuple[Tensor, int]:
    operator = torch.ops.pkg.spatial_correlation_sample.default
    return _as_one_batch(operator, info, in_dims, (input1, input2), options), 0


def _vmap_backward(
    info: Any, in_dims: Sequence[int | None], grad: Tensor, other: Tensor, *options: Any
) -> tuple[Tensor, int]:
    operator = torch.ops.pkg.spatial_correlation_sample_backward.default
    return _as_one_batch(operator, info, in_dims, (grad, other), options), 0


register_gradients(
    "spatial_correlation_sample",
    _backward,
    tangent=linear_in("spatial_correlation_sample", (0,), (1,)),
    setup_context=_setup_context,
)
register_gradients(
    "spatial_correlation_sample_backward",
    _double_backward,
    tangent=linear_in("spatial_correlation_sample_backward", (0,), (1,)),
    setup_context=_setup_double_backward,
)
torch.library.register_vmap("pkg::spatial_correlation_sample", _vmap)
torch.library.register_vmap("pkg::spatial_correlation_sample_backward", _vmap_backward)
register_lower_precision_autocast("spatial_correlation_sample")
register_sharding("spatial_correlation_sample", "input1 b c _ _, input2 b c _ _ -> b _ _ _ _")
register_sharding("spatial_correlation_sample_backward", "grad b _ _ _ _, other b c _ _ -> b c _ _")
