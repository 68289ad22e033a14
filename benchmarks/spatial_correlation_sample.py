"""The cost volumes of FlowNetC and PWC-Net, forward and in training.

The peers are two ways to write them with PyTorch's operators: shift by shift, a product and a sum
over the channels, and all shifts at once by ``unfold``, where its copy of an image for each shift
is not too large. The package spatial-correlation-sampler is one more where it is installed; what
is published of it does not build with a recent PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pkg import ops

from .harness import OURS, Case, Reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_UNFOLDED = 1 << 29  # bytes


@dataclass(frozen=True)
class Volume:
    """Two images, and the shifts at which each pixel of one meets the other."""

    network: str
    input1: Tensor
    input2: Tensor
    patch: int
    step: int = 1

    @staticmethod
    def random(
        network: str,
        shape: tuple[int, ...],
        patch: int,
        step: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Volume:
        first, second = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        return Volume(network, first, second, patch, step)

    def of(self, input1: Tensor, input2: Tensor) -> Volume:
        return Volume(self.network, input1, input2, self.patch, self.step)

    @property
    def reach(self) -> int:
        return self.patch // 2 * self.step

    @property
    def gigaoperations(self) -> float:
        """Of the terms whose pixels exist: those beyond the border are nobody's work."""
        pairs = 1
        for size in self.input1.shape[2:]:
            shifts = range(-self.reach, self.reach + 1, self.step)
            pairs *= sum(max(0, size - abs(shift)) for shift in shifts)
        return 2 * self.input1.shape[0] * self.input1.shape[1] * pairs / 1e9

    def __str__(self) -> str:
        dtype = str(self.input1.dtype).removeprefix("torch.")
        return f"{dtype}, {self.network}"


def _ours(volume: Volume) -> Tensor:
    return ops.spatial_correlation_sample(
        volume.input1, volume.input2, patch_size=volume.patch, dilation_patch=volume.step
    )


def _shift_by_shift(volume: Volume) -> Tensor:
    height, width = volume.input1.shape[2:]
    padded = functional.pad(volume.input2, (volume.reach,) * 4)
    shifts = range(0, 2 * volume.reach + 1, volume.step)
    sums = [
        (volume.input1 * padded[..., down : down + height, right : right + width]).sum(1)
        for down in shifts
        for right in shifts
    ]
    return torch.stack(sums, 1).unflatten(1, (volume.patch, volume.patch))


def _unfolded(volume: Volume) -> Tensor:
    batch, channels, height, width = volume.input1.shape
    around = functional.unfold(
        volume.input2, volume.patch, dilation=volume.step, padding=volume.reach
    ).view(batch, channels, volume.patch, volume.patch, height, width)
    return torch.einsum("bchw,bcpqhw->bpqhw", volume.input1, around)


def _their_package(volume: Volume) -> Tensor:
    package = importlib.import_module("spatial_correlation_sampler")
    result: Tensor = package.spatial_correlation_sample(
        volume.input1, volume.input2, patch_size=volume.patch, dilation_patch=volume.step
    )
    return result


def _functions(volume: Volume) -> dict[str, Callable[[Volume], Tensor]]:
    functions = {OURS: _ours, "PyTorch": _shift_by_shift}
    images = volume.input1
    if images.numel() * images.element_size() * volume.patch**2 <= MOST_UNFOLDED:
        functions["unfold"] = _unfolded
    # It has no half precision on the CPU: it ends the process.
    if images.device.type != "cpu" or images.dtype == torch.float32:
        try:
            importlib.import_module("spatial_correlation_sampler")
        except ImportError:
            pass
        else:
            functions["sampler"] = _their_package
    return functions


def _training(function: Callable[[Volume], Tensor], volume: Volume) -> Callable[[], Tensor]:
    """A forward and a backward pass, for the gradients of both images."""
    leaves = [each.detach().clone().requires_grad_() for each in (volume.input1, volume.input2)]
    of_leaves = volume.of(*leaves)

    def train() -> Tensor:
        output = function(of_leaves)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        return torch.cat([gradient.flatten() for gradient in gradients])

    return train


def _reference(function: Callable[[Volume], Tensor], volume: Volume) -> Reference:
    return Reference(
        lambda first, second: function(volume.of(first, second)), volume.input1, volume.input2
    )


def _case(volume: Volume, layout: str = "") -> Case:
    return Case(
        f"{volume}{layout}",
        {name: partial(each, volume) for name, each in _functions(volume).items()},
        _reference(_shift_by_shift, volume),
        volume.gigaoperations,
        "GFLOP/s",
        terms=volume.input1.shape[1],
        limit="float64" if volume.input1.dtype == torch.float64 else "float32",
        kind=volume.network,
    )


def _training_case(volume: Volume) -> Case:
    return Case(
        f"{volume}, forward and backward",
        {name: _training(each, volume) for name, each in _functions(volume).items()},
        _reference(lambda each: _training(_shift_by_shift, each)(), volume),
        3 * volume.gigaoperations,
        "GFLOP/s",
        terms=volume.patch**2,
        limit="float32",
        kind=f"{volume.network}, training",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """The layers of the two networks, in every memory format."""
    shapes = {
        "FlowNetC 1x256x48x64, patch 21, step 2": ((1, 256, 48, 64), 21, 2),
        "PWC-Net 1x32x96x128, patch 9": ((1, 32, 96, 128), 9, 1),
    }
    for network, (shape, patch, step) in shapes.items():
        for dtype in DTYPES:
            yield _case(Volume.random(network, shape, patch, step, dtype, device))
        volume = Volume.random(network, shape, patch, step, torch.float32, device)
        last = [
            each.to(memory_format=torch.channels_last) for each in (volume.input1, volume.input2)
        ]
        yield _case(volume.of(*last), ", channels last")
        for dtype in (torch.float32, torch.bfloat16):
            yield _training_case(Volume.random(network, shape, patch, step, dtype, device))


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Batches of eight pairs of images."""
    for dtype in (torch.float32, torch.bfloat16):
        for network, shape, patch, step in (
            ("FlowNetC 8x256x48x64, patch 21, step 2", (8, 256, 48, 64), 21, 2),
            ("PWC-Net 8x32x96x128, patch 9", (8, 32, 96, 128), 9, 1),
        ):
            volume = Volume.random(network, shape, patch, step, dtype, device)
            yield _case(volume)
            yield _training_case(volume)
