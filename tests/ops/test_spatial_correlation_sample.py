from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pkg
from pkg.testing import ErrorSample, Sample

correlate = pkg.ops.spatial_correlation_sample
gradient = torch.ops.pkg.spatial_correlation_sample_backward.default

Pair = int | tuple[int, int]
NAMES = ("kernel_size", "patch_size", "stride", "padding", "dilation", "dilation_patch")
DEFAULTS: tuple[Pair, ...] = (1, 1, 1, 0, 1, 1)


def pairs(*given: Pair) -> tuple[tuple[int, int], ...]:
    """As the operators of torch.ops.pkg want them; the public function takes numbers too."""
    return tuple((value, value) if isinstance(value, int) else value for value in given)


def options(**given: Pair) -> tuple[tuple[int, int], ...]:
    """All six parameters, in their order."""
    values = zip(NAMES, DEFAULTS, strict=True)
    return pairs(*(given.get(name, default) for name, default in values))


def of_pixels(shape: tuple[int, ...], **given: Pair) -> Sample:
    return Sample((normal(*shape), normal(*shape, seed=1), *options(**given)))


def images(*shape: int, seed: int = 0) -> Tensor:
    """Small integers, whose sums of products every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


# Every kind of parameters: those of the tracing checks first.
KINDS: list[tuple[tuple[int, ...], dict[str, Pair]]] = [
    ((2, 3, 5, 7), {"patch_size": 3}),
    (
        (1, 2, 6, 5),
        {
            "kernel_size": (2, 3),
            "patch_size": (2, 3),
            "stride": (1, 2),
            "padding": (2, 1),
            "dilation": (1, 2),
            "dilation_patch": (2, 1),
        },
    ),
    ((2, 2, 1, 1), {"patch_size": (3, 1)}),
    ((0, 2, 3, 4), {"patch_size": 2}),
]
FAMILY = {"kernel_size": 3, "patch_size": (4, 3), "stride": 2, "padding": 1, "dilation_patch": 2}
# All different, and different from the parameters: equal sizes would be taken to be equal always.
FAMILY_SHAPES = [(5, 6, 13, 18), (7, 8, 17, 22)]
# Around the widths of vectors and tiles, and of the chains of sums.
LONG: list[tuple[tuple[int, ...], dict[str, Pair]]] = [
    *(((1, 3, 4, width), {"patch_size": 5}) for width in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 65)),
    *(((1, channels, 4, 9), {"patch_size": 3}) for channels in (1, 4, 5, 7, 8, 9, 63, 65, 130)),
    *(((1, 4, 9, 20), {"patch_size": (3, size)}) for size in (1, 2, 4, 6, 8, 9, 10, 21)),
    ((1, 256, 6, 8), {"patch_size": 21, "dilation_patch": 2}),
    ((2, 32, 12, 16), {"patch_size": 9}),
    ((2, 0, 4, 5), {"patch_size": 3}),
    ((1, 2, 3, 4), {"patch_size": (1, 9), "dilation_patch": (1, 3)}),
    ((1, 2, 3, 3), {"patch_size": 4, "dilation_patch": 100}),
    ((1, 2, 5, 40), {"kernel_size": 3, "stride": 3, "padding": (0, 5), "patch_size": 2}),
    ((1, 2, 9, 9), {"kernel_size": (1, 3), "dilation": (1, 3), "stride": (4, 2), "padding": 4}),
    ((1, 2, 2, 2), {"padding": 40, "patch_size": 2}),
]


class TestSpatialCorrelationSample(OperatorTests):
    op = torch.ops.pkg.spatial_correlation_sample.default
    reference = staticmethod(references.spatial_correlation_sample)
    function = staticmethod(correlate)
    options = MappingProxyType({"autocast": "lower"})

    def samples(self) -> list[Sample]:
        samples = [of_pixels(shape, **given) for shape, given in KINDS]
        for shape in FAMILY_SHAPES:
            sample = of_pixels(shape, **FAMILY)
            samples.append(Sample(sample.args, family="images"))
        for shape, given in LONG:
            samples.append(Sample(of_pixels(shape, **given).args, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        image = torch.ones(1, 2, 3, 4)

        def wrong(match: str, *tensors: Tensor, **given: Pair) -> ErrorSample:
            both = {name: pairs(value)[0] for name, value in given.items()}
            return ErrorSample(tensors or (image, image), both, match=match)

        least = r"is \({}\); it must be at least {} and at most 1073741823"
        return [
            wrong(r"input1 has shape \(2, 3, 4\); it must have shape \(batch, c", image[0], image),
            wrong(r"input2 has shape \(2, 3, 4\); it must have shape \(batch, c", image, image[0]),
            wrong(
                r"input1 has shape \(1, 2, 3, 4\) but input2 has shape \(1, 2, 3, 3\)",
                *(image, image[..., :3]),
            ),
            wrong("input1 is torch.float32 but input2 is torch.float64", image, image.double()),
            wrong("input1 is torch.int64; supported are", image.long(), image.long()),
            wrong("kernel_size " + least.format("0, 0", 1), kernel_size=0),
            wrong("kernel_size " + least.format("1, -3", 1), kernel_size=(1, -3)),
            wrong("patch_size " + least.format("0, 0", 1), patch_size=0),
            wrong("patch_size " + least.format("3, 0", 1), patch_size=(3, 0)),
            wrong("stride " + least.format("-1, -1", 1), stride=-1),
            wrong("stride " + least.format("0, 1", 1), stride=(0, 1)),
            wrong("padding " + least.format("-1, 0", 0), padding=(-1, 0)),
            wrong("dilation " + least.format("0, 0", 1), dilation=0),
            wrong("dilation_patch " + least.format("0, 0", 1), dilation_patch=0),
            wrong("patch_size " + least.format("1, 1073741824", 1), patch_size=(1, 1 << 30)),
            wrong(
                r"covers 4 pixels in height but input1 of shape \(1, 2, 3, 4\) has 3",
                kernel_size=(4, 1),
            ),
            wrong(
                "covers 7 pixels in width but .* has 6 with its padding",
                kernel_size=(1, 3),
                dilation=(1, 3),
                padding=1,
            ),
            wrong(
                "more than any memory holds",
                patch_size=(1 << 30) - 1,
                padding=(1 << 20),
            ),
        ]


class TestSpatialCorrelationSampleBackward(OperatorTests):
    op = torch.ops.pkg.spatial_correlation_sample_backward.default
    reference = staticmethod(references.spatial_correlation_sample_backward)
    options = MappingProxyType({})
    # Values are compared of all samples, and TestSpatialCorrelationSample has this operator compute
    # the gradients of every call. What is thinned is the derivative of this backward operator,
    # which is made of the forward one and of itself, whatever the sizes.
    one_of = MappingProxyType(dict.fromkeys(("gradients", "layouts"), 3))

    def samples(self) -> list[Sample]:
        def sample(shape: tuple[int, ...], of_input2: bool, given: Any, **more: Any) -> Sample:
            other = normal(*shape)
            output = references.spatial_correlation_sample(other, other, *options(**given))
            return Sample(
                (normal(*output.shape, seed=2), other, of_input2, *options(**given)), **more
            )

        samples = []
        for of_input2 in (False, True):
            samples += [sample(shape, of_input2, given) for shape, given in KINDS]
            samples += [
                sample(shape, of_input2, FAMILY, family=f"images {of_input2}")
                for shape in FAMILY_SHAPES
            ]
            samples += [sample(*each, values_only=True) for each in self.long(of_input2)]
        return samples

    def long(self, of_input2: bool) -> Iterator[tuple[tuple[int, ...], bool, dict[str, Pair]]]:
        return ((shape, of_input2, given) for shape, given in LONG)

    def errors(self) -> list[ErrorSample]:
        image, grad = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 3, 3, 4)
        rest = options(patch_size=3)

        def wrong(match: str, *tensors: Tensor, rest: tuple[Any, ...] = rest) -> ErrorSample:
            return ErrorSample((*tensors, False, *rest), match=match)

        return [
            wrong(r"other has shape \(2, 3, 4\); it must have", grad, image[0]),
            wrong(r"grad has shape \(1, 3, 3, 4\); for other of shape", grad[:, 0], image),
            wrong(r"it must have shape \(1, 3, 3, 3, 4\)", grad[..., :2], image),
            wrong("grad is torch.float64 but other is torch.float32", grad.double(), image),
            wrong("grad is torch.int64; supported", grad.long(), image),
            wrong(r"patch_size is \(0, 0\)", grad, image, rest=options(patch_size=0)),
            wrong(
                "stride has 3 elements; it must be a number or a pair",
                grad,
                image,
                rest=(*rest[:2], [1, 1, 1], *rest[3:]),
            ),
        ]


def assert_same(tensors: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for result, wanted in zip(tensors, expected, strict=True):
        assert result.shape == wanted.shape, what
        same = (result == wanted) | (result.isnan() & wanted.isnan())
        assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} differ"


def results_of(
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    input1: Tensor,
    input2: Tensor,
    *given: Pair,
) -> tuple[Tensor, Tensor, Tensor]:
    output = forward(input1, input2, *given)
    grad = images(*output.shape, seed=3).to(output)
    return (
        output,
        backward(grad, input2, False, *given),
        backward(grad, input1, True, *given),
    )


def exact_results(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return results_of(
        references.spatial_correlation_sample,
        references.spatial_correlation_sample_backward,
        *arguments,
    )


SHAPES = [(1, 2, 6, 7), (2, 1, 5, 4), (1, 3, 1, 1), (1, 1, 2, 9)]


@pytest.mark.parametrize("patch_size", [1, 2, 3, (4, 1), (1, 5), (6, 3)])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, (1, 4), (3, 1)])
def test_every_combination_of_parameters(
    kernel_size: Pair, patch_size: Pair, device: torch.device
) -> None:
    """Sums of small integers are exact: to the bit, with either gradient."""
    rest = itertools.product((1, 2, (3, 1)), (0, 1, (2, 0), 7), (1, (2, 3)), (1, 2, (1, 4)))
    ran = 0
    for number, (stride, padding, dilation, dilation_patch) in enumerate(rest):
        given = pairs(kernel_size, patch_size, stride, padding, dilation, dilation_patch)
        shape = SHAPES[number % len(SHAPES)]
        if min(references._Shifts(torch.empty(shape), *given).output) < 1:
            with pytest.raises(RuntimeError, match="the kernel covers"):
                correlate(
                    torch.ones(shape, device=device), torch.ones(shape, device=device), *given
                )
            continue
        input1, input2 = (images(*shape, seed=seed) for seed in (number, number + 1000))
        dtype = FLOATING[number % len(FLOATING)]
        ours = results_of(
            correlate, gradient, *(t.to(device, dtype) for t in (input1, input2)), *given
        )
        assert all(result.dtype == dtype for result in ours)
        assert_same(
            tuple(r.cpu().double() for r in ours),
            exact_results(input1, input2, *given),
            f"{dtype} {shape} {given}",
        )
        ran += 1
    assert ran > 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "given",
    [
        options(patch_size=3),
        options(patch_size=(2, 4), kernel_size=3, padding=1),
        options(patch_size=3, kernel_size=2, stride=3, padding=2, dilation=2),
        options(patch_size=5, dilation_patch=3, stride=2),
    ],
    ids=str,
)
def test_what_is_no_term_spoils_nothing(
    given: tuple[Pair, ...], value: float, device: torch.device
) -> None:
    """A pixel without a partner, or that no output reads, may be NaN or infinite."""
    for number, dtype in itertools.product(range(6), FLOATING):
        input1, input2 = images(1, 2, 7, 8, seed=number), images(1, 2, 7, 8, seed=number + 50)
        spoilt = (input1, input2)[number % 2]
        rows, columns = [(0, -1), (-1, 0), (3, 3), (0, 4), (6, 7), (5, 6)][number]
        spoilt[:, :, rows, columns] = value
        ours = results_of(
            correlate, gradient, *(t.to(device, dtype) for t in (input1, input2)), *given
        )
        expected = exact_results(input1, input2, *given)
        assert_same(tuple(r.cpu().double() for r in ours), expected, f"{number} {dtype}")
        assert any(result.isfinite().any() for result in ours)


def test_half_precision_is_accumulated_in_float32(device: torch.device) -> None:
    """Sums of which float16 holds the result but not the way there, and bfloat16 no step."""
    image = torch.full((1, 64, 2, 3), 200.0, device=device)
    signs = torch.tensor([1.0, -1.0], device=device).repeat_interleave(32).view(1, 64, 1, 1)
    assert torch.equal(
        correlate((image * signs).half(), image.half()), torch.zeros_like(image[:, None, :1].half())
    )
    ones = torch.ones(1, 1000, 1, 1, device=device, dtype=torch.bfloat16)
    assert correlate(ones, ones).item() == 1000.0


@pytest.mark.parametrize("dtype", FLOATING)
def test_memory_formats_give_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    given = options(patch_size=5, kernel_size=3, padding=1)
    tensors = [normal(2, 37, 9, 21, seed=seed).to(device, dtype) for seed in (0, 1)]
    expected = results_of(correlate, gradient, *tensors, *given)
    last = [each.to(memory_format=torch.channels_last) for each in tensors]
    turned = [each.mT.contiguous().mT for each in tensors]
    apart = [torch.stack([each, each * 0], -1)[..., 0] for each in tensors]
    for arranged in (last, turned, apart, [last[0], tensors[1]]):
        assert_same(results_of(correlate, gradient, *arranged, *given), expected, "strides")
    # A gradient of a sum has strides of zero.
    leaves = [each.clone().requires_grad_() for each in tensors]
    correlate(*leaves, *given).sum().backward()
    output = correlate(*tensors, *given)
    assert_same(
        tuple(leaf.grad for leaf in leaves),
        (
            gradient(torch.ones_like(output), tensors[1], False, *given),
            gradient(torch.ones_like(output), tensors[0], True, *given),
        ),
        "expanded gradient",
    )


@pytest.mark.parametrize(
    "given",
    [
        options(patch_size=7),
        options(patch_size=(5, 3), kernel_size=3, padding=1, stride=2),
    ],
    ids=str,
)
def test_the_number_of_threads_does_not_change_a_bit(given: tuple[Pair, ...]) -> None:
    tensors = [normal(2, 40, 17, 33, seed=seed).float() for seed in (0, 1)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(results_of(correlate, gradient, *tensors, *given))
    finally:
        torch.set_num_threads(threads)
    for each in results[1:]:
        assert_same(each, results[0], "threads")


def test_a_pair_is_height_and_width_and_a_number_both() -> None:
    a, b = normal(1, 2, 5, 6), normal(1, 2, 5, 6, seed=1)
    assert torch.equal(
        correlate(a, b, 3, 2, 2, 1, 1, 2),
        correlate(a, b, (3, 3), (2, 2), (2, 2), (1, 1), (1, 1), (2, 2)),
    )
    shape = correlate(a, b, patch_size=(2, 3), stride=(4, 1)).shape
    assert shape == (1, 2, 3, 2, 6)
    # Where the CPU's kernel is not entered at once, and a gradient is recorded, too.
    elsewhere = (a.to("meta").requires_grad_(), b.to("meta"))
    assert correlate(*elsewhere, patch_size=(2, 3), stride=(4, 1)).shape == shape
    assert correlate(*elsewhere, 3, 2, 2, 1, 1, 2).shape == correlate(a, b, 3, 2, 2, 1, 1, 2).shape
    assert torch.equal(
        pkg._C.spatial_correlation_sample(a, b, patch_size=(2, 3), stride=(4, 1)),
        correlate(a, b, patch_size=(2, 3), stride=(4, 1)),
    )
    for function in (correlate, pkg._C.spatial_correlation_sample):
        with pytest.raises(RuntimeError, match="patch_size has 3 elements"):
            function(a, b, patch_size=(2, 3, 4))


class TestModules:
    def test_the_sampler_is_the_operator(self, device: torch.device) -> None:
        a, b = (normal(2, 4, 7, 9, seed=seed).to(device) for seed in (0, 1))
        given = dict(zip(NAMES, ((1, 3), (5, 2), (2, 1), (1, 0), (1, 2), 2), strict=True))
        module = pkg.nn.SpatialCorrelationSampler(**given)
        assert torch.equal(module(a, b), correlate(a, b, **given))
        assert "patch_size=(5, 2)" in repr(module)
        assert not list(module.state_dict())

    def test_the_flattened_one_is_a_mean(self, device: torch.device) -> None:
        a, b = (images(2, 8, 7, 9, seed=seed).to(device) for seed in (0, 1))
        module = pkg.nn.FlattenedCorrelation(kernel_size=(1, 2), patch_size=(3, 5))
        sums = correlate(a, b, (1, 2), (3, 5))
        expected = sums.reshape(2, 15, *sums.shape[3:]) / (8 * 2)
        assert torch.equal(module(a, b), expected)

    @pytest.mark.parametrize("stride1", [1, 2])
    @pytest.mark.parametrize(("pad", "far", "stride2"), [(4, 4, 1), (6, 4, 2), (5, 5, 2)])
    def test_is_nvidias_layer(self, pad: int, far: int, stride1: int, stride2: int) -> None:
        """Their loop, for a kernel of one pixel: mean products of images with a border of zeros."""
        a, b = images(1, 4, 7, 8), images(1, 4, 7, 8, seed=1)
        padded = [torch.nn.functional.pad(each, (pad,) * 4) for each in (a, b)]
        shifts = range(-(far // stride2) * stride2, far + 1, stride2)
        rows, columns = (range(far, size + 2 * pad - far, stride1) for size in (7, 8))
        expected = torch.stack(
            [
                torch.stack(
                    [
                        torch.stack(
                            [
                                (padded[0][0, :, y, x] * padded[1][0, :, y + dy, x + dx]).mean()
                                for x in columns
                            ]
                        )
                        for y in rows
                    ]
                )
                for dy in shifts
                for dx in shifts
            ]
        )[None]
        layer = pkg.nn.FlattenedCorrelation.from_nvidia(pad, 1, far, stride1, stride2)
        assert torch.equal(layer(a, b), expected)

    def test_the_mean_of_what_a_sum_does_not_hold(self) -> None:
        image = torch.full((1, 256, 2, 2), 100.0, dtype=torch.float16)
        assert correlate(image, image).isinf().all()
        mean = pkg.nn.FlattenedCorrelation()(image, image)
        assert torch.equal(mean, torch.full((1, 1, 2, 2), 10000.0, dtype=torch.float16))

    @pytest.mark.tracing
    @pytest.mark.parametrize("way", ["trace", "export", "strict export", "compile"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_a_mean_over_any_number_of_channels(self, way: str, dtype: torch.dtype) -> None:
        def pair(channels: int) -> tuple[Tensor, Tensor]:
            image = normal(2, channels, 5, 6).clamp(-1, 1)
            # float16 holds the mean of these products, and not the sum of many.
            return (200 * image).to(dtype), (100 * image).to(dtype)

        layer = pkg.nn.FlattenedCorrelation(kernel_size=(1, 3), patch_size=3)
        if way == "trace":
            program = torch.jit.trace(layer, pair(5))
        elif way == "compile":
            program = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        else:
            images = {1: torch.export.Dim("channels", min=1, max=5000)}
            program = torch.export.export(
                layer, pair(5), dynamic_shapes=(images, images), strict=way != "export"
            )
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            program = torch.export.load(file).module()
        # Around powers of two and of four, where the scale changes.
        for channels in (5, 1, 2, 3, 10, 11, 21, 22, 85, 86, 341, 342):
            expected = layer(*pair(channels))
            assert expected.isfinite().all()
            assert torch.equal(program(*pair(channels)), expected)

    @pytest.mark.tracing
    def test_a_program_of_fixed_channels_has_no_scale_to_compute(self) -> None:
        image = normal(2, 5, 5, 6)
        program = torch.export.export(pkg.nn.FlattenedCorrelation(), (image, image))
        assert "frexp" not in str(program.graph)

    @pytest.mark.tracing
    def test_images_without_values(self) -> None:
        layer = pkg.nn.FlattenedCorrelation(patch_size=3)
        image = torch.ones(2, 4, 5, 6, device="meta")
        assert layer(image, image).shape == (2, 9, 5, 6)
        with FakeTensorMode():
            assert layer(torch.ones(2, 4, 5, 6), torch.ones(2, 4, 5, 6)).shape == (2, 9, 5, 6)

    @pytest.mark.parametrize(
        "module", [pkg.nn.SpatialCorrelationSampler(), pkg.nn.FlattenedCorrelation()]
    )
    def test_what_is_no_tensor_is_refused_in_words(self, module: torch.nn.Module) -> None:
        image, name = torch.ones(1, 2, 3, 4), type(module).__name__
        with pytest.raises(TypeError, match=f"{name}: input1 is None; it must be a floating tens"):
            module(None, image)
        with pytest.raises(TypeError, match=f"{name}: input2 is of type float; it must be"):
            module(image, 1.0)
        with pytest.raises(RuntimeError, match=r"input1 has shape \(3,\); it must have shape"):
            module(torch.ones(3), torch.ones(3))

    def test_wrong_parameters_of_nvidias_are_refused(self) -> None:
        make = pkg.nn.FlattenedCorrelation.from_nvidia
        with pytest.raises(ValueError, match="pad_size is 3; it must be at least max_"):
            make(3, 1, 4)
        with pytest.raises(ValueError, match="kernel_size is 2; it must be odd"):
            make(4, 2, 4)
        with pytest.raises(ValueError, match="stride2 is 0"):
            make(4, 1, 4, 1, 0)
