"""Find how a picture moved between two frames, with a pyramid of cost volumes.

The frames are a photograph that matplotlib brings along, or one of yours, before and after a motion
that is known: the camera turns, moves closer and sideways. Nothing is learned: each pixel goes
where ``pkg.ops.spatial_correlation_sample`` finds the best match of its neighbourhood, from coarse
to fine. The program prints by how many pixels the flow that it found is off (the end-point error),
and leaves a picture of it (flow.png) in the output folder.

    python examples/optical_flow.py
    python examples/optical_flow.py --picture my-photograph.jpg --degrees -6 --right 20

The exit status is 0 when the mean error is below a tenth of the mean motion, or a fifth of a pixel,
1 when it is not, 2 when there is nothing to run on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import needs

with needs.words_for_missing_packages("optical_flow.py"):
    import torch
    from pyramid_flow.estimation import Settings, estimate
    from pyramid_flow.frames import SAMPLE, FrameError, Motion, frames_of, inside, read_picture
    from pyramid_flow.picture import save
    from rich.console import Console
    from torch import Tensor

    from pkg import ops

PATCH = 9
LEAST_SIDE = 32


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=words[0])
    parser.add_argument("--picture", type=Path, default=SAMPLE, help="default: matplotlib's sample")
    parser.add_argument("--longest", type=int, default=512, help="side, in pixels (%(default)s)")
    output = Path(__file__).with_name("output")
    parser.add_argument("--output", type=Path, default=output, help="folder of the picture")
    motion = Motion()
    for name, help_ in (
        ("degrees", "that the picture turns"),
        ("zoom", "by which it grows"),
        ("right", "by which it moves to the right, in 512ths of its width"),
        ("down", "the same, downwards"),
    ):
        default = getattr(motion, name)
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{help_} ({default})")
    return parser.parse_args(arguments)


class Matcher:
    """The cost volume of two frames' features, and how long all of them took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.operations = 0

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        start = time.perf_counter()
        matches = ops.spatial_correlation_sample(first, second, patch_size=PATCH)
        self.seconds += time.perf_counter() - start
        self.operations += 2 * matches.numel() * first.shape[1]
        return matches


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console()
    try:
        picture = read_picture(options.picture, options.longest)
        height, width = picture.shape[2:]
        if min(height, width) < LEAST_SIDE:
            raise FrameError(f"the picture is {width} x {height}; it needs {LEAST_SIDE} each way")
    except FrameError as error:
        print(f"optical_flow: {error}", file=sys.stderr)
        return 2
    motion = Motion(options.degrees, options.zoom, options.right, options.down)
    first, second, true = frames_of(picture, motion)

    matcher = Matcher()
    start = time.perf_counter()
    with torch.no_grad():
        found = estimate(first, second, matcher, Settings())
    seconds = time.perf_counter() - start

    seen = inside(true)
    error = torch.hypot(*(found - true)[0])[seen]
    length = torch.hypot(*true[0])[seen]
    console.print(f"{width} x {height} pixels, which move by {length.mean():.2f} on average")
    console.print(
        f"end-point error: mean {error.mean():.3f} pixels, median {error.median():.3f}, "
        f"{(error < 1).float().mean():.1%} of pixels below 1"
    )
    console.print(
        f"{seconds:.2f} s, of which the cost volumes took {matcher.seconds:.3f} s "
        f"({matcher.operations / matcher.seconds / 1e9:.1f} GFLOP/s)"
    )
    file = options.output / "flow.png"
    save(file, first, second, true, found)
    console.print(f"picture: {file}")
    return 0 if error.mean() < max(0.1 * length.mean(), 0.2) else 1


if __name__ == "__main__":
    sys.exit(main())
