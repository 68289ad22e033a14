"""examples/optical_flow.py: it finds known motions, draws them, and refuses in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pkg

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
for needed in ("matplotlib", "PIL", "rich"):
    pytest.importorskip(needed)

import optical_flow  # noqa: E402
from pyramid_flow.estimation import Settings, descriptors, estimate  # noqa: E402
from pyramid_flow.frames import Motion, frames_of, inside, read_picture, sample  # noqa: E402
from pyramid_flow.picture import colour_wheel, colours, draw  # noqa: E402


def correlate(first: Tensor, second: Tensor) -> Tensor:
    return pkg.ops.spatial_correlation_sample(first, second, patch_size=9)


def texture(height: int, width: int) -> Tensor:
    rough = torch.rand(1, 1, height // 4, width // 4)
    return torch.nn.functional.interpolate(rough, (height, width), mode="bicubic").clamp(0, 1)


def test_a_small_run_finds_the_motion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optical_flow.main(["--longest", "256", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "end-point error: mean" in printed
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")


def test_a_motion_that_is_not_found_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def still(
        first: Tensor, second: Tensor, correlate: optical_flow.Matcher, settings: Settings
    ) -> Tensor:
        correlate(first, second)
        return first.new_zeros(1, 2, *first.shape[2:])

    monkeypatch.setattr(optical_flow, "estimate", still)
    assert optical_flow.main(["--longest", "64", "--output", str(tmp_path)]) == 1
    assert "end-point error" in capsys.readouterr().out


@pytest.mark.parametrize(("right", "down"), [(3, 0), (-7, 5), (20, -12)])
def test_whole_pixels_of_a_texture_are_found(right: int, down: int) -> None:
    second = texture(192, 256)
    true = torch.tensor([right, down], dtype=torch.float32).view(1, 2, 1, 1).expand(1, 2, 192, 256)
    found = estimate(sample(second, true), second, correlate, Settings())
    error = torch.hypot(*(found - true)[0])
    # Nearer to the right pixel than to any other; away from the border, where the first frame shows
    # what the second does not, as far as the smoothing of the coarse levels carries it.
    assert error[64:-64, 64:-64].max() < 0.5


def test_frames_differ_by_the_flow() -> None:
    picture = texture(40, 60)
    motion = Motion(degrees=0, zoom=1, right=512 / 60 * 2, down=-512 / 60)
    first, second, flow = frames_of(picture, motion)
    assert torch.equal(second, picture)
    torch.testing.assert_close(flow, torch.tensor([2.0, -1.0]).view(1, 2, 1, 1).expand_as(flow))
    torch.testing.assert_close(first[..., 1:, :-2], picture[..., :-1, 2:])
    assert inside(flow).sum() == 39 * 58
    turned = Motion(degrees=90, zoom=1, right=0, down=0).flow(3, 3)
    torch.testing.assert_close(turned[0, :, 0, 0], torch.tensor([2.0, 0.0]))


def test_descriptors_are_blind_to_light() -> None:
    frame = texture(16, 20)
    plain, bright = descriptors(frame, 5), descriptors(frame * 0.5 + 0.25, 5)
    assert plain.shape == (1, 25, 16, 20)
    similar = (plain * bright).sum(1) / (plain.norm(dim=1) * bright.norm(dim=1))
    torch.testing.assert_close(similar, torch.ones_like(similar))
    assert plain.norm(dim=1).max() <= 1


def test_colours_tell_direction_and_length() -> None:
    wheel = colour_wheel()
    assert wheel.shape == (55, 3)
    assert wheel.unique(dim=0).shape == wheel.shape
    angle = torch.arange(360) * torch.pi / 180
    around = torch.stack([angle.cos(), angle.sin()]).view(1, 2, 1, 360)
    full = colours(around, 1.0)[0]
    # No two neighbours are far apart, the last and the first neither.
    assert (full - full.roll(1, 0)).abs().max() < 0.06
    assert (full.unsqueeze(0) - full.unsqueeze(1)).abs().sum(-1).max() > 1.9
    assert torch.equal(colours(0 * around, 1.0)[0], torch.ones(360, 3))
    half = colours(0.5 * around, 1.0)[0]
    torch.testing.assert_close(half, 1 - 0.5 * (1 - full))


@pytest.mark.parametrize(("height", "width"), [(60, 50), (40, 90), (90, 40)])
def test_the_panels_are_aligned(height: int, width: int) -> None:
    picture = texture(height, width)
    figure = draw(*frames_of(picture, Motion())[:2], *[torch.ones(1, 2, height, width)] * 2)
    figure.canvas.draw()
    panels = [each for each in figure.axes if each.get_title()]
    boxes = [each.get_window_extent() for each in panels]
    assert len(boxes) == 6
    tops = [box.y1 for box in boxes]
    assert max(tops) - min(tops) < 0.5  # pixels
    bottoms = [box.y0 for box in boxes[:5]]
    assert max(bottoms) - min(bottoms) < 0.5
    # Nothing lies beyond the border, as what stands below the panels might.
    for each in figure.axes:
        box = each.get_tightbbox()
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.height
    for bar in set(figure.axes) - set(panels):
        assert bar.get_tightbbox().y1 < min(bottoms)


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "words.png"
    file.write_text("no picture")
    assert optical_flow.main(["--picture", str(file)]) == 2
    assert "cannot be read as a picture" in capsys.readouterr().err
    assert optical_flow.main(["--picture", str(tmp_path / "none.png")]) == 2
    assert optical_flow.main(["--longest", "20"]) == 2
    assert "it needs 32 each way" in capsys.readouterr().err


def test_pictures_come_in_grey(tmp_path: Path) -> None:
    from matplotlib import image

    red = torch.zeros(40, 50, 3)
    red[..., 0] = 1
    image.imsave(tmp_path / "red.png", red.numpy())
    picture = read_picture(tmp_path / "red.png", 25)
    assert picture.shape == (1, 1, 20, 25)
    torch.testing.assert_close(picture, torch.full_like(picture, 0.299), atol=0.01, rtol=0)


def test_help_names_the_options() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "optical_flow.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(option in done.stdout for option in ("--picture", "--degrees", "--zoom", "--right"))
