"""accelerate() computes convolutions in half precision by float32 where PyTorch unfolds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate_tables
import pytest
import torch
from torch import Tensor, nn

import pkg
from pkg import _accelerate_convolutions
from pkg.accelerate import Report
from pkg.testing import Sample, expect

HALVES = _accelerate_convolutions.lacking()
if not HALVES:
    pytest.skip("oneDNN has convolutions of every dtype here", allow_module_level=True)
HALF = HALVES[0]
forward = torch.ops.aten.convolution.default
backward = torch.ops.aten.convolution_backward.default


@pytest.fixture(autouse=True)
def some_table() -> Iterator[None]:
    """One by which nothing else is taken."""
    with accelerate_tables.in_use(0.0):
        with pkg.accelerate():
            pass
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::convolution", "CPU"):
            pytest.skip("this PyTorch's convolutions cannot be called in C++")
        yield


def calls(report: Report) -> dict[str, tuple[int, int]]:
    return {each.operator: (each.taken, each.left) for each in report.counts}


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def given(dims: int, **changed: Any) -> list[Any]:
    """What a convolution takes after its tensors."""
    plain = {
        "stride": [1] * dims,
        "padding": [0] * dims,
        "dilation": [1] * dims,
        "transposed": False,
        "output_padding": [0] * dims,
        "groups": 1,
    }
    return list({**plain, **changed}.values())


# The images' channels and sizes, the weight's shape, and what else is given.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "a kernel of 3": ((16, 20, 17), (32, 16, 3, 3), {"padding": [1, 1]}),
    "one number for both": ((16, 20, 17), (16, 16, 3, 3), {"stride": [2], "padding": [1]}),
    "patches": ((3, 48, 32), (64, 3, 16, 16), {"stride": [16, 16]}),
    "steps": ((16, 33, 40), (16, 16, 3, 5), {"stride": [2, 3], "padding": [2, 0]}),
    "a dilated one": ((16, 20, 17), (16, 16, 3, 3), {"dilation": [2, 3]}),
    "groups": ((16, 20, 17), (32, 4, 3, 3), {"groups": 4}),
    "each channel": ((24, 20, 17), (24, 1, 3, 3), {"groups": 24, "padding": [1, 1]}),
    "transposed": (
        (16, 20, 17),
        (16, 8, 3, 3),
        {"transposed": True, "stride": [2, 2], "output_padding": [1, 0]},
    ),
    "transposed, groups": ((16, 20, 17), (16, 8, 2, 3), {"transposed": True, "groups": 4}),
    "one dimension": ((32, 200), (32, 32, 3), {"padding": [1], "stride": [2]}),
    "one dimension, groups": ((32, 200), (32, 8, 3), {"groups": 4}),
    "one dimension, transposed": ((32, 100), (32, 16, 3), {"transposed": True}),
    "a volume": ((8, 9, 10, 11), (16, 8, 3, 2, 3), {"padding": [1, 0, 1]}),
    "a volume, groups": ((8, 9, 10, 11), (16, 4, 3, 2, 3), {"groups": 2}),
    "a volume, dilated": ((8, 9, 10, 11), (16, 8, 3, 2, 3), {"dilation": [2, 1, 2]}),
    "a volume, transposed": ((8, 9, 10, 11), (8, 16, 3, 2, 3), {"transposed": True}),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def laid_out(tensor: Tensor, is_last: bool) -> Tensor:
    is_last = is_last and tensor.ndim in LAST
    return tensor.contiguous(memory_format=LAST[tensor.ndim]) if is_last else tensor


def strides(tensor: Tensor) -> list[int]:
    """Those that matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def test_an_image_of_one_column_in_groups_is_left_to_pytorch() -> None:
    """Of float32 PyTorch's own ends the process, where that of half precision does not."""
    images = laid_out(numbers(1, 16, 5, 1, dtype=HALF), is_last=True)
    weight, bias = numbers(16, 4, 1, 1, dtype=HALF), numbers(16, dtype=HALF)
    rest = given(2, stride=[2, 2], padding=[0, 1], dilation=[1, 2], groups=4)
    expected = forward(images, weight, bias, *rest)
    with pkg.accelerate(report=True) as block:
        assert torch.equal(forward(images, weight, bias, *rest), expected)
        assert calls(block.report()) == {"convolution": (0, 1)}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
def test_an_expanded_batch_has_pytorch_s_strides(dtype: torch.dtype, transposed: bool) -> None:
    images = laid_out(numbers(1, 16, 19, 19, dtype=dtype), is_last=True).expand(2, 16, 19, 19)
    weight = numbers(16, 16, 3, 3, dtype=dtype)
    rest = given(2, padding=[2, 2], transposed=transposed)
    expected = forward(images, weight, None, *rest)
    gradient = torch.ones_like(expected)
    arguments = (gradient, images, weight, None, *rest, [True, True, False])
    gradients = backward(*arguments)
    with pkg.accelerate(report=True) as block:
        made = [forward(images, weight, None, *rest), *backward(*arguments)[:2]]
        assert all(taken for taken, _ in calls(block.report()).values())
    assert [strides(each) for each in made] == [
        strides(each) for each in (expected, *gradients[:2])
    ]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SHAPES)
def test_results(name: str, dtype: torch.dtype, is_last: bool, has_bias: bool) -> None:
    image, kernel, changed = SHAPES[name]
    rest = given(len(kernel) - 2, **changed)
    images = laid_out(numbers(2, *image, dtype=dtype), is_last)
    # Only one of the two, so that layouts meet.
    weight = laid_out(numbers(*kernel, dtype=dtype), is_last and has_bias)
    channels = kernel[1] * rest[-1] if rest[3] else kernel[0]
    bias = numbers(channels, dtype=dtype) if has_bias else None
    gradient = numbers(*forward(images, weight, bias, *rest).shape, dtype=dtype)
    gradient = laid_out(gradient, is_last)

    def run(sample: Sample) -> list[Tensor]:
        images, weight, bias, gradient = sample.args
        found = backward(gradient, images, weight, [channels], *rest, [True] * 3)
        return [forward(images, weight, bias, *rest), *found]

    sample = Sample((images, weight, bias, gradient), {})
    theirs = run(sample)
    with pkg.accelerate(report=True) as block:
        ours = run(sample)
        found = calls(block.report())
    assert found == {"convolution": (1, 0), "convolution_backward": (1, 0)}
    for index, (wanted, actual) in enumerate(zip(expect(run, sample), ours, strict=True)):
        assert actual.dtype == dtype
        assert actual.shape == theirs[index].shape
        assert strides(actual) == strides(theirs[index]), index
        wanted.compare(actual, f"result {index}")


def test_only_gradients_that_are_asked_for() -> None:
    images, weight = (numbers(2, 16, side, side, dtype=HALF) for side in (30, 3))
    gradient = numbers(2, 2, 28, 28, dtype=HALF)
    for mask in ((True, False, False), (False, True, True), (False, False, True)):
        with pkg.accelerate(report=True) as block:
            found = backward(gradient, images, weight, [2], *given(2), mask)
            assert calls(block.report()) == {"convolution_backward": (1, 0)}
        assert [each is not None for each in found] == list(mask)


def test_modules_train() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, groups=4, stride=2),
        nn.Conv2d(32, 16, 3, dilation=2, padding="same", padding_mode="reflect"),
        nn.ConvTranspose2d(16, 8, 3),
    ).to(HALF)
    images = numbers(2, 8, 24, 24, dtype=HALF)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(images).float().square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = gradients()
    with pkg.accelerate(report=True) as block:
        ours = gradients()
        assert calls(block.report()) == {"convolution": (4, 0), "convolution_backward": (4, 0)}
    assert len(plain) == len(ours) == 8
    for index, (found, expected) in enumerate(zip(ours, plain, strict=True)):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2, msg=str(index))


@pytest.mark.parametrize("side", [4, 24])
@pytest.mark.parametrize("dtype", [HALF, torch.float32, torch.float64])
def test_what_is_left_is_pytorch_s_to_the_bit(side: int, dtype: torch.dtype) -> None:
    """Small ones, for which the conversions would take longer, and other dtypes."""
    if dtype == HALF and side > 4:
        pytest.skip("taken")
    images, weight = numbers(1, 8, side, side, dtype=dtype), numbers(8, 8, 3, 3, dtype=dtype)
    bias = numbers(8, dtype=dtype)

    def run() -> list[Tensor]:
        result = forward(images, weight, bias, *given(2, padding=[1, 1]))
        rest = given(2, padding=[1, 1])
        return [result, *backward(result, images, weight, [8], *rest, [True] * 3)]

    expected = run()
    with pkg.accelerate(report=True) as block:
        found = run()
        is_counted = dtype == HALF
        left = {"convolution": (0, 1), "convolution_backward": (0, 1)}
        assert calls(block.report()) == (left if is_counted else {})
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    again = run()
    assert all(torch.equal(*each) for each in zip(again, expected, strict=True))


def wrong_calls(dtype: torch.dtype) -> Iterator[list[Any]]:
    images, weight = numbers(1, 8, 24, 24, dtype=dtype), numbers(8, 8, 3, 3, dtype=dtype)
    bias = numbers(8, dtype=dtype)
    yield [images, numbers(8, 4, 3, 3, dtype=dtype), None, *given(2)]
    yield [images, weight.double(), None, *given(2)]
    yield [images, numbers(8, 8, 40, 40, dtype=dtype), None, *given(2)]
    yield [images, numbers(8, 8, 3, dtype=dtype), None, *given(2)]
    yield [images[0, 0], weight, None, *given(2)]
    yield [images, weight, bias[:3], *given(2)]
    yield [images, weight, bias.double(), *given(2)]
    yield [images, weight, bias.view(2, 4), *given(2)]
    yield [images, weight, None, *given(2, stride=[0, 1])]
    yield [images, weight, None, *given(2, stride=[-1, 1])]
    yield [images, weight, None, *given(2, padding=[-1, 0])]
    yield [images, weight, None, *given(2, dilation=[0, 1])]
    yield [images, weight, None, *given(2, groups=3)]
    yield [images, weight, None, *given(2, groups=0)]
    yield [images, weight, None, *given(2, stride=[1, 1, 1])]
    yield [images, weight, None, *given(2, padding=[1] * 12)]
    yield [images, weight, None, *given(2, transposed=True, output_padding=[3, 3])]
    yield [images.to_sparse(), weight, None, *given(2)]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_errors_are_pytorch_s(dtype: torch.dtype) -> None:
    said: list[list[str]] = []
    for on in (False, True):
        said.append([])
        with pkg.accelerate(on):
            for call in wrong_calls(dtype):
                try:
                    forward(*call)
                except (RuntimeError, NotImplementedError) as error:
                    said[-1].append(
                        type(error).__name__ + str(error).partition("\nException raised")[0]
                    )
                else:
                    said[-1].append("nothing")
    assert said[0] == said[1]
    assert said[0].count("nothing") <= 2


@pytest.mark.parametrize(
    ("channels", "groups", "columns", "is_taken"),
    # 8 x 8 x 3 x 3 of a kernel at 19 x 24 places, or 23, are about 2 ** 18.
    [(8, 1, 26, True), (8, 1, 25, False), (4, 2, 26, True), (4, 2, 25, False), (2, 4, 3, True)],
)
def test_the_limit_counts_multiplications_and_groups(
    channels: int, groups: int, columns: int, is_taken: bool
) -> None:
    images = numbers(1, channels * groups, 21, columns, dtype=HALF)
    weight = numbers(8, channels, 3, 3, dtype=HALF)
    with pkg.accelerate(report=True) as block:
        forward(images, weight, None, *given(2, groups=groups))
        assert calls(block.report()) == {"convolution": (int(is_taken), int(not is_taken))}


def test_nothing_is_kept() -> None:
    tensors = [numbers(*shape, dtype=HALF) for shape in ((1, 8, 24, 24), (8, 8, 3, 3), (8,))]
    small = [numbers(*shape, dtype=HALF) for shape in ((1, 8, 4, 4), (8, 8, 3, 3), (8,))]
    gradient = numbers(1, 8, 22, 22, dtype=HALF)

    def owners() -> list[int]:
        storages = [each.untyped_storage() for each in (*tensors, *small, gradient)]
        return [torch._C._storage_Use_Count(each._cdata) for each in storages]

    with pkg.accelerate():
        before = owners()
        for _ in range(10):
            result = forward(*tensors, *given(2))
            forward(*small, *given(2))
            backward(gradient, *tensors[:2], [8], *given(2), [True] * 3)
            with pytest.raises(RuntimeError, match="groups"):
                forward(*tensors, *given(2, groups=0))
        assert torch._C._storage_Use_Count(result.untyped_storage()._cdata) == 2
        assert owners() == before


@pytest.mark.tracing
def test_transforms_see_nothing_of_it() -> None:
    """The kernels lie below batches, fake tensors and export."""
    images, weight = numbers(3, 2, 16, 24, 24, dtype=HALF), numbers(8, 16, 3, 3, dtype=HALF)

    def convolve(each: Tensor) -> Tensor:
        return nn.functional.conv2d(each, weight, groups=1)

    expected = torch.stack([convolve(each) for each in images])
    with pkg.accelerate(report=True) as block:
        found = torch.func.vmap(convolve)(images)
        assert calls(block.report()) == {"convolution": (1, 0)}
        with torch._subclasses.FakeTensorMode() as mode:
            both = mode.from_tensor(images), mode.from_tensor(weight)
            fake = nn.functional.conv2d(both[0][0], both[1])
    assert fake.shape == expected[0].shape
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.long
def test_compiled() -> None:
    """Inductor asserts the strides that it expects of a convolution."""
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.GELU(), nn.Conv2d(32, 32, 3, groups=32)).to(HALF)
    compiled = torch.compile(model, fullgraph=True)
    for format in (torch.contiguous_format, torch.channels_last):
        images = numbers(2, 8, 24, 24, dtype=HALF).contiguous(memory_format=format)
        expected = model(images)
        with pkg.accelerate(report=True) as block:
            found = compiled(images)
            assert calls(block.report())["convolution"] == (2, 0)
            found.float().sum().backward()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)
