"""The kernels of spatial_correlation_sample, run on the CPU by the emulator."""

from __future__ import annotations

import itertools

import pytest
import references
import torch
from emulator import Argument, Emulator
from operator_collection import operator_classes
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAMES = ("kernel_size", "patch_size", "stride", "padding", "dilation", "dilation_patch")
Pair = int | tuple[int, int]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_of(images: Tensor, options: tuple[Pair, ...]) -> dict[str, Argument]:
    pairs = {
        name: (value, value) if isinstance(value, int) else tuple(value)
        for name, value in zip(NAMES, options, strict=True)
    }
    output = references._Shifts(images, *options).output
    return {
        "type": name_of(images.dtype),
        "batch": images.shape[0],
        "channels": images.shape[1],
        "size": tuple(images.shape[2:]),
        "output_size": tuple(output),
        **pairs,
    }


def operands(**tensors: Tensor) -> dict[str, Argument]:
    strides = {f"{name}_strides": tensor.stride() for name, tensor in tensors.items()}
    return {**tensors, **strides}


def emulated(emulator: Emulator, input1: Tensor, input2: Tensor, *options: Pair) -> Tensor:
    arguments = shape_of(input1, options)
    sizes = (*arguments["patch_size"], *arguments["output_size"])
    output = torch.full((input1.shape[0], *sizes), 77, dtype=input1.dtype)
    arguments |= operands(input1=input1, input2=input2)
    emulator.run("spatial_correlation", ["output"], output=output, **arguments)
    return output


def emulated_gradient(
    emulator: Emulator, grad: Tensor, other: Tensor, of_input2: bool, *options: Pair
) -> Tensor:
    result = torch.full(other.shape, 77, dtype=other.dtype)
    arguments = shape_of(other, options) | operands(grad=grad, other=other)
    arguments["of_input2"] = int(of_input2)
    emulator.run("spatial_correlation_gradient", ["output"], output=result, **arguments)
    return result


def integers(*shape: int) -> Tensor:
    """Whose sums of products every dtype holds exactly."""
    return torch.randint(-2, 3, shape).double()


def assert_same(result: Tensor, expected: Tensor, what: object) -> None:
    result = result.double()
    same = (result == expected) | (result.isnan() & expected.isnan())
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} differ"


def check(
    emulator: Emulator,
    input1: Tensor,
    input2: Tensor,
    *options: Pair,
    dtype: torch.dtype = torch.float32,
) -> None:
    expected = references.spatial_correlation_sample(input1, input2, *options)
    first, second = input1.to(dtype), input2.to(dtype)
    assert_same(emulated(emulator, first, second, *options), expected, options)
    grad = integers(*expected.shape)
    for of_input2, other in ((False, input2), (True, input1)):
        wanted = references.spatial_correlation_sample_backward(grad, other, of_input2, *options)
        given = (grad.to(dtype), other.to(dtype), of_input2)
        assert_same(emulated_gradient(emulator, *given, *options), wanted, (of_input2, options))


@pytest.mark.parametrize("kernel_size", [1, 2, (1, 3), (3, 2)])
def test_parameters(cuda_emulator: Emulator, kernel_size: Pair) -> None:
    """Every pair of values of two parameters, in one dtype or another."""
    rest = itertools.product((1, 3, (4, 2)), (1, (3, 2)), (0, (1, 3)), (1, 2), (1, (1, 3)))
    for number, options in enumerate(rest):
        if number.bit_count() % 2:
            continue
        dtype = DTYPES[number // 2 % len(DTYPES)]
        images = integers(1, 3, 7, 8), integers(1, 3, 7, 8)
        check(cuda_emulator, *images, kernel_size, *options, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sizes_around_every_tile(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    widths = (1, 15, 16, 17, 31, 32, 33, 64, 65)
    patches = (9, 1, 8, 10, 16, 17, 18, 7, 2)
    for width, patch in zip(widths, patches, strict=True):
        images = integers(1, 2, 2, width), integers(1, 2, 2, width)
        check(cuda_emulator, *images, 1, (1, patch), 1, 0, 1, 1, dtype=dtype)
    for height, patch in ((1, 5), (3, 4), (4, 3), (5, 2), (9, 7)):
        images = integers(2, 2, height, 3), integers(2, 2, height, 3)
        check(cuda_emulator, *images, 1, (patch, 1), 1, 0, 1, 1, dtype=dtype)
    for channels in (0, 1, 7, 8, 9, 31, 32, 33, 64, 65):
        images = integers(1, channels, 2, 3), integers(1, channels, 2, 3)
        check(cuda_emulator, *images, 1, 2, 1, 0, 1, 1, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        (1, (1, 18), 1, 0, 1, 18),  # many classes of positions, each of one group
        (1, (1, 11), 1, 0, 1, 2),  # a tile with groups of two classes
        (1, (1, 3), 1, 0, 1, 150),  # a class for each position
        (1, (1, 19), (1, 4), 0, 1, 1),  # classes of shifts, each of some
        (1, (1, 3), (1, 5), 0, 1, 1),  # and of one
        (1, (1, 23), (1, 6), (0, 2), 1, (1, 4)),  # of both
        ((1, 2), (1, 3), 1, 0, (1, 97), 1),
        (1, 3, 2**30 - 1, 0, 1, 2**30 - 2),  # pixels of a class 2^60 apart
    ],
    ids=str,
)
def test_classes_of_positions_and_shifts(
    cuda_emulator: Emulator, options: tuple[Pair, ...]
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        images = integers(1, 9, 1, 140), integers(1, 9, 1, 140)
        check(cuda_emulator, *images, *options, dtype=dtype)


def test_strides(cuda_emulator: Emulator) -> None:
    images = integers(2, 10, 3, 35), integers(2, 10, 3, 35)
    for arrange in (
        lambda each: each.to(memory_format=torch.channels_last),
        lambda each: each.mT.contiguous().mT,
        lambda each: torch.stack([each, each * 0], -1)[..., 0],
    ):
        arranged = [arrange(each) for each in images]
        check(cuda_emulator, *arranged, 2, 3, 1, 1, 1, 1)


def test_what_is_no_term_spoils_nothing(cuda_emulator: Emulator) -> None:
    for number, value in itertools.product(range(4), (torch.nan, torch.inf)):
        for count, (stride, dilation_patch) in enumerate(((1, 1), (3, 2), (1, 20))):
            images = integers(1, 3, 6, 7), integers(1, 3, 6, 7)
            row, column = [(0, -1), (-1, 0), (3, 3), (5, 6)][number]
            images[number % 2][:, :, row, column] = value
            dtype = (torch.float32, torch.bfloat16)[count % 2]
            check(cuda_emulator, *images, 2, 3, stride, 1, 1, dilation_patch, dtype=dtype)
            check(cuda_emulator, *images, 1, 3, stride, 1, 1, dilation_patch)
            check(cuda_emulator, *images, 1, 3, 1, 0, 1, 1, dtype=torch.float16)


def test_matrices_are_loaded_once_for_two_rows(cuda_emulator: Emulator) -> None:
    """As cuda/correlation/forward_mma.cuh says: no bank conflicts, 36 products for 16 loads."""
    images = integers(1, 32, 4, 32), integers(1, 32, 4, 32)
    emulated(cuda_emulator, *(each.half() for each in images), 1, (3, 9), 1, 0, 1, 1)
    counted = cuda_emulator.counters
    assert (counted.products, counted.matrix_loads) == (4 * 36, 4 * 16)
    assert counted.matrix_load_cycles == 4 * counted.matrix_loads


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "name", ["spatial_correlation_sample", "spatial_correlation_sample_backward"]
)
def test_the_operator(
    emulated_operators: torch._ops._OpNamespace, name: str, dtype: torch.dtype
) -> None:
    """The host code too, on the samples of the CPU's operator."""
    reference = getattr(references, name)
    for sample in operator_classes()[name]().samples():
        converted: Sample = sample.converted(dtype)
        (expected,) = expect(lambda each: [reference(*each.args)], converted)
        result = getattr(emulated_operators, name)(*converted.args)
        expected.compare(result, str(converted))
        assert result.is_contiguous()
