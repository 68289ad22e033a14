"""A flow as a picture: its direction as a hue, its length as how strong the colour is."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

# The steps from red by yellow, green, cyan, blue and magenta to red again, as many as the eye tells
# apart (Baker and others, https://doi.org/10.1007/s11263-010-0390-2).
STEPS = (15, 6, 4, 11, 13, 6)
CORNERS = ((1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 1, 1), (0, 0, 1), (1, 0, 1))


def colour_wheel() -> Tensor:
    """The colours of all directions, in turn: shape (55, 3)."""
    corners = torch.tensor([*CORNERS, CORNERS[0]], dtype=torch.float32)
    parts = []
    for index, steps in enumerate(STEPS):
        share = torch.arange(steps).unsqueeze(1) / steps
        parts.append(corners[index] * (1 - share) + corners[index + 1] * share)
    return torch.cat(parts)


def colours(flow: Tensor, longest: float) -> Tensor:
    """A flow (1, 2, H, W) as colours (H, W, 3): white where nothing moves."""
    wheel = colour_wheel()
    right, down = flow[0]
    turn = (torch.atan2(-down, -right) / math.pi + 1) / 2 * len(wheel)
    below = turn.floor().long() % len(wheel)
    share = turn.frac().unsqueeze(-1)
    hue = wheel[below] * (1 - share) + wheel[(below + 1) % len(wheel)] * share
    length = (torch.hypot(right, down) / max(longest, 1e-9)).clamp(0, 1).unsqueeze(-1)
    return 1 - length * (1 - hue)


def disc(size: int) -> Tensor:
    """All directions and lengths up to 1, (1, 2, size, size), beyond which nothing moves."""
    line = torch.linspace(-1, 1, size)
    down, right = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([right, down])[None] * (torch.hypot(right, down) <= 1)


def draw(first: Tensor, second: Tensor, true: Tensor, found: Tensor) -> Figure:
    """The frames, the true flow and the one that was found, its error, and the colour wheel."""
    longest = float(torch.hypot(*true[0]).max())
    error = torch.hypot(*(found - true)[0])
    height, width = first.shape[2:]
    # As high as the pictures are, or the square wheel, with room for titles and what stands below.
    figure = Figure(figsize=(15, 1 + 2.4 * max(height / width, 1)), layout="constrained")
    places = figure.subplots(1, 6)
    for place, frame, title in (
        (places[0], first, "first frame"),
        (places[1], second, "second frame"),
    ):
        place.imshow(frame[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        place.set_title(title)
    places[2].imshow(colours(true, longest).numpy())
    places[2].set_title("true flow")
    places[3].imshow(colours(found, longest).numpy())
    places[3].set_title("found flow")
    shown = places[4].imshow(error.numpy(), cmap="magma", vmin=0, vmax=2)
    places[4].set_title("error, pixels")
    # Below the panel and no part of it: the panel stays as large and as high up as its neighbours.
    inch = width / height / 2.4  # of the panel's height
    bar = places[4].inset_axes((0.0, -0.34 * inch, 1.0, 0.12 * inch))
    figure.colorbar(shown, cax=bar, orientation="horizontal")
    places[5].imshow(colours(disc(129), 1.0).numpy(), extent=(-longest, longest, longest, -longest))
    places[5].set_title("colours: pixels right, down")
    for place in places:
        place.set_anchor("N")
    for place in places[:5]:
        place.set_axis_off()
    return figure


def save(file: Path, first: Tensor, second: Tensor, true: Tensor, found: Tensor) -> None:
    """Write that picture."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(first, second, true, found).savefig(file, dpi=110)
