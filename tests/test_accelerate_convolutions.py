"""accelerate() computes convolutions in half precision by float32 where PyTorch unfolds them."""

from __future__ import annotations

from collections.abc import Iterator

import accelerate_tables
import pytest
import torch
from torch import Tensor, nn

import pkg
from pkg import _accelerate_convolutions
from pkg.accelerate import Report
from pkg.testing import Sample, expect

HALVES = [torch.float16, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    not _accelerate_convolutions.is_needed(), reason="oneDNN has convolutions of every dtype here"
)


@pytest.fixture(autouse=True)
def some_table() -> Iterator[None]:
    """One by which nothing else is taken."""
    with accelerate_tables.in_use(0.0):
        yield


def calls(report: Report) -> dict[str, tuple[int, int]]:
    return {each.operator: (each.taken, each.left) for each in report.counts}


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# Channels in and out, sides of the image and of the kernel, stride, padding, bias.
SHAPES = {
    "a kernel of 3": (16, 32, (20, 17), (3, 3), (1, 1), (1, 1), True),
    "patches": (3, 64, (48, 32), (16, 16), (16, 16), (0, 0), True),
    "no bias, steps": (16, 16, (33, 40), (3, 5), (2, 3), (2, 0), False),
    "one dimension": (32, 32, (1, 100), (1, 3), (1, 1), (0, 1), True),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SHAPES)
def test_results(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Of PyTorch's own operators of unfolded images, which not every dtype comes to here."""
    into, out, image, kernel, stride, padding, has_bias = SHAPES[name]
    images = numbers(2, into, *image, dtype=dtype).contiguous(memory_format=layout)
    weight = numbers(out, into, *kernel, dtype=dtype).contiguous(memory_format=layout)
    bias = numbers(out, dtype=dtype) if has_bias else None
    forward = torch.ops.aten._slow_conv2d_forward.default
    result = forward(images, weight, kernel, bias, stride, padding)
    gradient = numbers(*result.shape, dtype=dtype).contiguous(memory_format=layout)
    backward = torch.ops.aten._slow_conv2d_backward.output_mask

    def run(sample: Sample) -> list[Tensor]:
        images, weight, bias, gradient = sample.args
        rest = kernel, stride, padding
        found = backward(gradient, images, weight, *rest, (True, True, True))
        return [forward(images, weight, kernel, bias, stride, padding), *found]

    sample = Sample((images, weight, bias, gradient), {})
    theirs = run(sample)
    with pkg.accelerate(report=True) as block:
        ours = run(sample)
        found = calls(block.report())
    assert found == {"conv2d": (1, 0), "conv2d_backward": (1, 0)}
    for index, (wanted, actual) in enumerate(zip(expect(run, sample), ours, strict=True)):
        assert actual.dtype == dtype
        assert actual.shape == theirs[index].shape
        assert actual.stride() == theirs[index].stride(), index
        wanted.compare(actual, f"result {index}")


def test_only_gradients_that_are_asked_for() -> None:
    images, weight = (numbers(2, 16, side, side, dtype=torch.float16) for side in (30, 3))
    gradient = numbers(2, 2, 28, 28, dtype=torch.float16)
    backward = torch.ops.aten._slow_conv2d_backward.output_mask
    for mask in ((True, False, False), (False, True, True), (False, False, True)):
        with pkg.accelerate(report=True) as block:
            rest = (3, 3), (1, 1), (0, 0)
            found = backward(gradient, images, weight, *rest, mask)
            assert calls(block.report()) == {"conv2d_backward": (1, 0)}
        assert [each is not None for each in found] == list(mask)


def test_modules_train() -> None:
    """Groups, dilation and three dimensions go their own ways, by these operators or others."""
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, groups=4, stride=2),
        nn.Conv2d(32, 16, 3, dilation=2),
        nn.ConvTranspose2d(16, 8, 3),
    ).half()
    images = numbers(2, 8, 24, 24, dtype=torch.float16)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(images).float().square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = gradients()
    with pkg.accelerate():
        ours = gradients()
    assert len(plain) == len(ours) == 8
    for index, (found, expected) in enumerate(zip(ours, plain, strict=True)):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2, msg=str(index))


@pytest.mark.parametrize(
    ("side", "dtype", "counted"),
    [
        (4, torch.float16, {"conv2d": (0, 1)}),
        (24, torch.float32, {}),
        (24, torch.float64, {}),
    ],
)
def test_what_is_left_is_pytorch_s_to_the_bit(
    side: int, dtype: torch.dtype, counted: dict[str, tuple[int, int]]
) -> None:
    """Small ones, for which the conversions would take longer, and other dtypes."""
    images, weight = numbers(1, 8, side, side, dtype=dtype), numbers(8, 8, 3, 3, dtype=dtype)
    forward = torch.ops.aten._slow_conv2d_forward.default
    expected = forward(images, weight, (3, 3), None, (1, 1), (1, 1))
    with pkg.accelerate(report=True) as block:
        found = forward(images, weight, (3, 3), None, (1, 1), (1, 1))
        assert calls(block.report()) == counted
    assert torch.equal(found, expected)


def test_errors_are_pytorch_s() -> None:
    images = numbers(1, 8, 24, 24, dtype=torch.float16)
    for weight in (
        numbers(8, 4, 3, 3, dtype=torch.float16),
        numbers(8, 8, 3, 3, dtype=torch.bfloat16),
        numbers(8, 8, 40, 40, dtype=torch.float16),
        numbers(8, 8, 3, dtype=torch.float16),
    ):
        said = []
        for on in (False, True):
            pkg.accelerate(on)
            with pytest.raises(RuntimeError) as caught:
                nn.functional.conv2d(images, weight)
            said.append(str(caught.value))
        assert said[0] == said[1]


def test_the_limit_of_small_ones_counts_multiplications() -> None:
    images, weight = numbers(2, 3, 10, 9, dtype=torch.float16), torch.ones(4, 3, 3, 2)
    work = _accelerate_convolutions._work(images, weight, (2, 1), (1, 0))
    rows, columns = nn.functional.conv2d(images.float(), weight, None, (2, 1), (1, 0)).shape[2:]
    assert work == 2 * rows * columns * 4 * 3 * 3 * 2
