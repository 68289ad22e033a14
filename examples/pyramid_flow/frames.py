"""Two real frames between which every pixel moves by a known flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import image as mpl_image
from torch import Tensor
from torch.nn import functional

# A photograph that matplotlib brings along.
SAMPLE = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"


class FrameError(Exception):
    """There is no such picture; the message says which."""


@dataclass(frozen=True)
class Motion:
    """Of a camera: turned and moved closer around the middle, then shifted.

    Attributes:
        degrees: Clockwise, as seen.
        zoom: Beyond 1 what is seen grows.
        right: Pixels, for a picture 512 pixels wide; as many fewer for a smaller one.
        down: Likewise.
    """

    degrees: float = 3.0
    zoom: float = 1.02
    right: float = 9.0
    down: float = -5.0

    def flow(self, height: int, width: int) -> Tensor:
        """Where each pixel goes, in pixels to the right and down: shape (1, 2, height, width)."""
        y, x = (
            torch.arange(size, dtype=torch.float32) - (size - 1) / 2 for size in (height, width)
        )
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        angle = torch.deg2rad(torch.tensor(self.degrees))
        cosine, sine = self.zoom * torch.cos(angle), self.zoom * torch.sin(angle)
        shift = width / 512
        new_x = cosine * grid_x - sine * grid_y + self.right * shift
        new_y = sine * grid_x + cosine * grid_y + self.down * shift
        return torch.stack([new_x - grid_x, new_y - grid_y])[None]


def read_picture(path: Path, longest: int) -> Tensor:
    """A picture in grey, shape (1, 1, height, width), values of 0 to 1, its longer side limited."""
    try:
        pixels = np.asarray(mpl_image.imread(path))
    except (OSError, SyntaxError, ValueError) as error:  # what image readers raise
        raise FrameError(f"{path} cannot be read as a picture: {error}") from None
    picture = torch.from_numpy(pixels.astype(np.float32))
    if pixels.dtype == np.uint8:
        picture = picture / 255
    if picture.dim() == 3:
        picture = picture[..., :3] @ torch.tensor([0.299, 0.587, 0.114])[: picture.shape[-1]]
    picture = picture[None, None]
    scale = longest / max(picture.shape[2:])
    if scale < 1:
        size = [round(side * scale) for side in picture.shape[2:]]
        picture = functional.interpolate(picture, size, mode="bilinear", antialias=True)
    return picture


def sample(images: Tensor, flow: Tensor) -> Tensor:
    """At each pixel what the images hold where the flow leads; at the border its last pixel."""
    height, width = images.shape[2:]
    y, x = (torch.arange(size, dtype=flow.dtype) for size in (height, width))
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    places = torch.stack(
        [
            (grid_x + flow[:, 0]) * 2 / max(width - 1, 1) - 1,
            (grid_y + flow[:, 1]) * 2 / max(height - 1, 1) - 1,
        ],
        -1,
    )
    return functional.grid_sample(
        images, places, mode="bicubic", padding_mode="border", align_corners=True
    )


def frames_of(picture: Tensor, motion: Motion) -> tuple[Tensor, Tensor, Tensor]:
    """The first frame, the second, and the flow from the first to the second.

    The second is the picture itself, the first is seen through the flow: so a pixel of the first
    is found in the second exactly where the flow says.
    """
    flow = motion.flow(*picture.shape[2:])
    return sample(picture, flow), picture, flow


def inside(flow: Tensor) -> Tensor:
    """Which pixels stay in the picture: a boolean (height, width)."""
    height, width = flow.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    to_x, to_y = x + flow[0, 0], y + flow[0, 1]
    return (to_x >= 0) & (to_x <= width - 1) & (to_y >= 0) & (to_y <= height - 1)
