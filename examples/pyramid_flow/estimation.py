"""Optical flow from cost volumes, from coarse to fine: as PWC-Net does it, with nothing learned.

At each level of a pyramid the second frame is drawn back by the flow found so far, and every pixel
of the first is compared with those around it in the second: with unit vectors of their
neighbourhoods, of which ``spatial_correlation_sample`` gives all products. What is left to find are
a few pixels, which are twice as many at the next level.
(PWC-Net: Sun and others, https://arxiv.org/abs/1709.02371.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .frames import sample

CostVolume = Callable[[Tensor, Tensor], Tensor]
"""Of features (1, C, H, W), twice, to (1, patch, patch, H, W)."""


@dataclass(frozen=True)
class Settings:
    """How the flow is looked for.

    Attributes:
        levels: Of the pyramid, each half as large as the one before.
        window: Pixels of a neighbourhood, across.
        smoothing: Pixels, across, over which costs and flow are averaged; odd.
        sharpness: Of the choice among shifts: how much a better match counts.
        reluctance: To move: what a shift by one pixel has to gain in its match, by two four times
            as much. Where there is nothing to be seen, the flow of the level before stays.
        rounds: At each level.
    """

    levels: int = 5
    window: int = 7
    smoothing: int = 9
    sharpness: float = 40.0
    reluctance: float = 0.003
    rounds: int = 2


def descriptors(frame: Tensor, window: int) -> Tensor:
    """For each pixel its neighbourhood without its mean, as a unit vector: (1, window², H, W).

    The product of two is their normalised cross-correlation, which no change of light disturbs.
    """
    border = window // 2
    padded = functional.pad(frame, (border,) * 4, mode="replicate")
    around = functional.unfold(padded, window).view(1, window * window, *frame.shape[2:])
    centred = around - around.mean(1, keepdim=True)
    # A flat neighbourhood has no direction to compare: noise of a hundredth keeps it near zero.
    return centred / (centred.square().sum(1, keepdim=True) + (0.01 * window) ** 2).sqrt()


def box_mean(images: Tensor, size: int) -> Tensor:
    """The mean over a square around each pixel, of those pixels of it that exist."""
    return functional.avg_pool2d(images, size, 1, size // 2, count_include_pad=False)


def confidence(frame: Tensor, window: int) -> Tensor:
    """How much there is to be seen around each pixel, from nearly 0 to nearly 1: (1, 1, H, W)."""
    variance = (box_mean(frame * frame, window) - box_mean(frame, window).square()).clamp(min=0)
    return 1e-3 + variance / (variance + 0.02**2)


def best_shift(matches: Tensor, settings: Settings) -> Tensor:
    """The mean shift of each pixel, weighted by how well it matches: (1, 2, H, W), right and down.

    Weights fall off with the distance from the best shift too, so that a second peak far away
    does not draw the mean to itself.
    """
    _, size, _, height, width = matches.shape
    radius = size // 2
    offsets = torch.arange(-radius, radius + 1, dtype=matches.dtype)
    down, right = (
        each.reshape(-1, 1, 1) for each in torch.meshgrid(offsets, offsets, indexing="ij")
    )
    flat = matches.reshape(size * size, height, width)
    flat = flat - settings.reluctance * (down.square() + right.square())
    best = flat.argmax(0)
    distance = (down - down.flatten()[best]).square() + (right - right.flatten()[best]).square()
    weights = torch.softmax(settings.sharpness * flat - 0.5 * distance, 0)
    return torch.stack([(weights * right).sum(0), (weights * down).sum(0)])[None]


def estimate(first: Tensor, second: Tensor, correlate: CostVolume, settings: Settings) -> Tensor:
    """The flow from the first frame to the second, in pixels: (1, 2, H, W), right and down."""
    pyramid = [(first, second)]
    while len(pyramid) < settings.levels and min(pyramid[-1][0].shape[2:]) >= 32:
        pyramid.append(
            tuple(  # type: ignore[arg-type]
                functional.interpolate(each, scale_factor=0.5, mode="bilinear", antialias=True)
                for each in pyramid[-1]
            )
        )
    flow = first.new_zeros(1, 2, *pyramid[-1][0].shape[2:])
    for level_first, level_second in reversed(pyramid):
        size = level_first.shape[2:]
        scale = torch.tensor([size[1] / flow.shape[3], size[0] / flow.shape[2]])
        flow = functional.interpolate(flow, size, mode="bilinear") * scale.view(1, 2, 1, 1)
        features = descriptors(level_first, settings.window)
        trust = confidence(level_first, settings.window)
        for _ in range(settings.rounds):
            moved = descriptors(sample(level_second, flow), settings.window)
            matches = correlate(features, moved)
            matches = box_mean(matches.flatten(1, 2), settings.smoothing).view_as(matches)
            flow = flow + best_shift(matches, settings)
            # Where there is nothing to be seen, the neighbours know better.
            flow = box_mean(flow * trust, settings.smoothing) / box_mean(trust, settings.smoothing)
    return flow
