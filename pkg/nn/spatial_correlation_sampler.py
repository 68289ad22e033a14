"""``SpatialCorrelationSampler`` and ``FlattenedCorrelation``: cost volumes of two images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._arguments import check_tensor
from ..ops.spatial_correlation_sample import spatial_correlation_sample
from ._tracing import is_traced, node_or_refusal

if TYPE_CHECKING:
    from typing_extensions import Self

_IMAGE = "a floating tensor of shape (B, C, H, W)"


class SpatialCorrelationSampler(torch.nn.Module):
    """:func:`pkg.ops.spatial_correlation_sample` as a module, with the same parameters.

    It takes the place of the class of this name in the package spatial-correlation-sampler. It has
    no parameters to learn and no state.

    Args:
        kernel_size: Of the window that is summed at each position.
        patch_size: How many shifts are tried.
        stride: From one position to the next.
        padding: Of the images.
        dilation: Between the pixels of the window.
        dilation_patch: Between shifts.

    Example:
        >>> sampler = SpatialCorrelationSampler(patch_size=9)
        >>> sampler(torch.ones(1, 32, 6, 8), torch.ones(1, 32, 6, 8)).shape
        torch.Size([1, 9, 9, 6, 8])
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int] = 1,
        patch_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        dilation_patch: int | tuple[int, int] = 1,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.patch_size = patch_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.dilation_patch = dilation_patch

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """The correlation, of shape (B, patch height, patch width, oH, oW).

        Raises:
            RuntimeError: As :func:`pkg.ops.spatial_correlation_sample`.
            TypeError: An image is no tensor.
        """
        if is_traced(input1, input2):
            return self._node(input1, input2)
        self._check(input1, input2)
        return spatial_correlation_sample(
            input1,
            input2,
            self.kernel_size,
            self.patch_size,
            self.stride,
            self.padding,
            self.dilation,
            self.dilation_patch,
        )

    def _check(self, input1: Tensor, input2: Tensor) -> None:
        check_tensor(type(self).__name__, "input1", input1, _IMAGE)
        check_tensor(type(self).__name__, "input2", input2, _IMAGE)

    def _node(self, input1: Tensor, input2: Tensor) -> Tensor:
        name, images = type(self).__name__, (input1, input2)
        node: Tensor = node_or_refusal(self, name, "input1", _IMAGE, images)
        return node

    def extra_repr(self) -> str:
        """The parameters."""
        return (
            f"kernel_size={self.kernel_size}, patch_size={self.patch_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"dilation_patch={self.dilation_patch}"
        )


class FlattenedCorrelation(SpatialCorrelationSampler):
    """The correlation as NVIDIA's layer lays it out: one channel for each shift, and a mean.

    The layer of NVIDIA's FlowNet2, which many networks for optical flow were trained with, differs
    from :class:`SpatialCorrelationSampler` in what it returns:

    - its shape is (B, patch height * patch width, oH, oW): shift (ph, pw) is channel
      ``ph * patch_width + pw``, so that a convolution can follow;
    - it is the mean of the products, not their sum: divided by the number of channels times that
      of the pixels of the kernel window. Terms outside the images count as zeros in it.

    :meth:`from_nvidia` takes that layer's parameters. With a kernel of one pixel, as all of those
    networks have, its results are the same. With a larger one NVIDIA's window lies half of its size
    too far to the upper left, as against its own border; here it does not.

    Args:
        kernel_size: Of the window that is averaged at each position.
        patch_size: How many shifts are tried.
        stride: From one position to the next.
        padding: Of the images; not NVIDIA's ``pad_size``, see :meth:`from_nvidia`.
        dilation: Between the pixels of the window.
        dilation_patch: Between shifts.

    Example:
        >>> layer = FlattenedCorrelation(patch_size=9)
        >>> layer(torch.ones(1, 32, 6, 8), torch.ones(1, 32, 6, 8)).shape
        torch.Size([1, 81, 6, 8])
    """

    @classmethod
    def from_nvidia(
        cls,
        pad_size: int,
        kernel_size: int,
        max_displacement: int,
        stride1: int = 1,
        stride2: int = 1,
    ) -> Self:
        """The layer with the parameters of NVIDIA's ``Correlation``.

        Args:
            pad_size: Zeros around the images; at least ``max_displacement``, with which the
                output is as large as the images.
            kernel_size: Odd.
            max_displacement: The longest shift, in pixels.
            stride1: From one position to the next.
            stride2: Between shifts, in pixels.

        Raises:
            ValueError: The output would be smaller than the images are without their border, or
                the kernel is even.

        Example:
            >>> FlattenedCorrelation.from_nvidia(20, 1, 20, 1, 2).patch_size
            21
        """
        if pad_size < max_displacement:
            raise ValueError(
                f"pad_size is {pad_size}; it must be at least max_displacement, {max_displacement}"
            )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {kernel_size}; it must be odd and positive")
        if stride2 < 1:
            raise ValueError(f"stride2 is {stride2}; it must be positive")
        return cls(
            kernel_size=kernel_size,
            patch_size=2 * (max_displacement // stride2) + 1,
            stride=stride1,
            padding=pad_size - max_displacement,
            dilation_patch=stride2,
        )

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """The mean correlation, of shape (B, patch height * patch width, oH, oW).

        Raises:
            RuntimeError: As :func:`pkg.ops.spatial_correlation_sample`.
            TypeError: An image is no tensor.
        """
        if is_traced(input1, input2):
            return self._node(input1, input2)
        self._check(input1, input2)
        if input1.dim() != 4:
            return super().forward(input1, input2)  # which refuses it in words
        kernel = self.kernel_size
        window = kernel * kernel if isinstance(kernel, int) else kernel[0] * kernel[1]
        scale, divisor = _scaling(input1.shape[1], window)
        sums = super().forward(input1 * scale, input2 * scale)
        mean: Tensor = sums.flatten(1, 2) / divisor
        return mean


def _scaling(channels: Any, window: int) -> tuple[Any, Any]:
    """What both images are multiplied by, and what the sum is then divided by for the mean.

    The factor makes the images a little smaller, by a power of two and so exactly: a sum that
    float16 could not hold, though it holds the mean, does not overflow on the way.

    Args:
        channels: Of the images: a number; or, where the program is to take any, a symbol of
            ``torch.export`` or the tensor that ``torch.jit.trace`` gives for a size.
        window: Pixels of the kernel.

    Returns:
        Two numbers, or two tensors without dimensions on the CPU.
    """
    if _is_number(channels):
        terms = max(1, channels * window)
        scale = 0.5 ** ((terms.bit_length() - 1) // 2)
        return scale, terms * scale * scale
    if isinstance(channels, Tensor):
        wide = channels.to(torch.float64)
    else:
        wide = torch.full((), channels, dtype=torch.float64, device="cpu")
    wide = (wide * window).clamp(min=1)
    bits = torch.frexp(wide).exponent
    inverse = (torch.ones_like(bits) << (bits - 1) // 2).to(torch.float64)
    return 1 / inverse, wide / (inverse * inverse)


def _is_number(size: Any) -> bool:
    if torch.compiler.is_compiling():
        # Slow to import, and there already where anything is compiled.
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return has_static_value(size)
    return isinstance(size, int)
