"""Every pointwise kernel, run on the CPU by the emulator, against plain PyTorch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import references
import torch
from emulator import Emulator
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
C = -0.625  # exact in every dtype
COUNTS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 8191, 8193]
SPECIAL = [0.0, -0.0, 1e-7, -2e-3, 1.0, -3.5, 20.0, -90.0, 6e4, torch.inf, -torch.inf]


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def muladd(a: Tensor, b: Tensor) -> Tensor:
    return references.muladd(a, b, C)


def activation_backward(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda saved, grad: references.linear_activation_backward(grad, saved, name)


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "mul": references.mul,
    "muladd": muladd,
    "add": add,
    "d_sigmoid": references.d_sigmoid,
    "d_sigmoid_backward": references.d_sigmoid_backward,
    **{f"{name}_backward": activation_backward(name) for name in ACTIVATIONS},
}
BINARY = ["mul", "muladd", "add", "d_sigmoid_backward", "gelu_backward"]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def agree(function: str, result: Tensor, *inputs: Tensor) -> None:
    """Integers agree exactly, floats as closely as every operator of the package has to."""

    def evaluate(sample: Sample) -> list[Tensor]:
        return [REFERENCES[function](*sample.args)]

    (expected,) = expect(evaluate, Sample(inputs))
    expected.compare(result, function)


def emulated_dense(emulator: Emulator, function: str, *inputs: Tensor, blocks: int = 3) -> Tensor:
    """On inputs of one dtype, each contiguous or a single element."""
    count = max(each.numel() for each in inputs) if all(each.numel() for each in inputs) else 0
    output = torch.full((count,), 77).to(inputs[0].dtype)
    emulator.run(
        "pointwise_dense",
        ["output"],
        blocks,
        function=function,
        common_type=name_of(output.dtype),
        a=inputs[0],
        b=inputs[1] if len(inputs) > 1 else None,
        c=C,
        is_single=[int(each.numel() == 1) for each in inputs] + [0],
        count=count,
        output=output,
    )
    return output


def emulated_strided(
    emulator: Emulator,
    function: str,
    output: Tensor,
    *inputs: Tensor,
    blocks: int = 3,
    indices: str = "narrow",
) -> Tensor:
    """On inputs that broadcast to the output, of any dtypes; writes into the output."""
    if function == "muladd" and not torch.result_type(*inputs).is_floating_point:
        common = torch.get_default_dtype()
    else:
        common = torch.result_type(*inputs) if len(inputs) > 1 else inputs[0].dtype
    a, b = (each.expand(output.shape) for each in (inputs[0], inputs[-1]))
    emulator.run(
        "pointwise_strided",
        ["output"],
        blocks,
        indices=indices,
        function=function,
        common_type=name_of(common),
        output_type=name_of(output.dtype),
        a_type=name_of(a.dtype),
        b_type=name_of(b.dtype),
        a=a,
        b=b,
        c=C,
        shape=output.shape,
        output_strides=output.stride(),
        a_strides=a.stride(),
        b_strides=b.stride(),
        output=output,
    )
    return output


@pytest.mark.parametrize("function", REFERENCES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dense_floats(cuda_emulator: Emulator, function: str, dtype: torch.dtype) -> None:
    inputs = 1 if function == "d_sigmoid" else 2
    for count in COUNTS:
        operands = [values(count, dtype=dtype) for _ in range(inputs)]
        agree(function, emulated_dense(cuda_emulator, function, *operands), *operands)


@pytest.mark.parametrize("function", ["mul", "add"])
@pytest.mark.parametrize("dtype", INTEGERS[1:], ids=name_of)
def test_dense_integers(cuda_emulator: Emulator, function: str, dtype: torch.dtype) -> None:
    for count in (1, 15, 16, 17, 4097):
        operands = [values(count, dtype=dtype) for _ in range(2)]
        agree(function, emulated_dense(cuda_emulator, function, *operands), *operands)


@pytest.mark.parametrize("function", BINARY)
@pytest.mark.parametrize("single", [0, 1])
def test_dense_with_a_single_element(cuda_emulator: Emulator, function: str, single: int) -> None:
    operands = [values(1 if each == single else 1030, dtype=torch.float32) for each in range(2)]
    agree(function, emulated_dense(cuda_emulator, function, *operands), *operands)


@pytest.mark.parametrize("function", REFERENCES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_special_values(cuda_emulator: Emulator, function: str, dtype: torch.dtype) -> None:
    special = torch.tensor([*SPECIAL, torch.nan], dtype=torch.float64).to(dtype)
    pairs = torch.cartesian_prod(special, special)
    operands = [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]
    operands = operands[: 1 if function == "d_sigmoid" else 2]
    result = emulated_dense(cuda_emulator, function, *operands)
    agree(function, result, *operands)
    output = torch.empty_like(result)
    assert torch.equal(
        emulated_strided(cuda_emulator, function, output, *operands).nan_to_num(nan=123),
        result.nan_to_num(nan=123),
    )


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.dtype], Tensor]]] = {
    "transposed": ((40, 33), lambda dtype: values(33, 40, dtype=dtype).t()),
    "steps": ((40, 33), lambda dtype: values(80, 99, dtype=dtype)[::2, ::3]),
    "misaligned": ((40, 33), lambda dtype: values(1321, dtype=dtype)[1:].view(40, 33)),
    "row": ((40, 33), lambda dtype: values(33, dtype=dtype)),
    "column": ((40, 33), lambda dtype: values(40, 1, dtype=dtype)),
    "single": ((40, 33), lambda dtype: values(dtype=dtype)),
    "five dimensions": (
        (2, 3, 4, 5, 6),
        lambda dtype: values(4, 1, 6, dtype=dtype)[:, :, torch.arange(6)],
    ),
    "empty": ((3, 0, 2), lambda dtype: values(2, dtype=dtype)),
    "no dimensions": ((), lambda dtype: values(dtype=dtype)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", BINARY)
def test_strided(cuda_emulator: Emulator, layout: str, function: str) -> None:
    shape, arrange = LAYOUTS[layout]
    for dtype in FLOATS:
        a, b = values(*shape, dtype=dtype), arrange(dtype)
        for operands in ((a, b), (b, a)):
            output = torch.full(shape, 77, dtype=dtype)
            emulated_strided(cuda_emulator, function, output, *operands)
            expanded = [each.expand(shape) for each in operands]
            agree(function, output, *expanded)
        wide = torch.full(shape, 77, dtype=dtype)
        emulated_strided(cuda_emulator, function, wide, *operands, indices="wide")
        assert torch.equal(wide, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=name_of)
def test_strided_output_leaves_its_gaps_alone(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    storage = torch.full((20, 30), 1, dtype=torch.float64).to(dtype)
    before = storage.clone()
    output = storage[1::2, 2::3]
    a, b = values(10, 10, dtype=dtype), values(10, dtype=dtype)
    emulated_strided(cuda_emulator, "add", output, a, b)
    assert torch.equal(output, a + b)
    storage[1::2, 2::3] = before[1::2, 2::3]
    assert torch.equal(storage, before)


@pytest.mark.parametrize("function", ["mul", "muladd", "add"])
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=name_of)
def test_every_pair_of_dtypes(cuda_emulator: Emulator, function: str, dtype: torch.dtype) -> None:
    for other, shape in itertools.product(INTEGERS + FLOATS, [(3, 17), ()]):
        a, b = values(3, 17, dtype=dtype), values(*shape, dtype=other)
        output = torch.empty((3, 17), dtype=REFERENCES[function](a, b).dtype)
        agree(function, emulated_strided(cuda_emulator, function, output, a, b), a, b)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=name_of)
def test_sums_into_every_dtype_that_holds_them(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    for wide in INTEGERS + FLOATS:
        if torch.can_cast(dtype, wide):
            a, b = values(257, dtype=dtype), values(257, dtype=dtype)
            expected = (a + b).to(wide)
            output = torch.empty(257, dtype=wide)
            result = emulated_strided(cuda_emulator, "add", output, a, b)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("indices", "bits"), [("narrow", 31), ("wide", 63)])
def test_division_by_multiplication(cuda_emulator: Emulator, indices: str, bits: int) -> None:
    """Around the multiples of each divisor, where a quotient that is off by one shows."""
    most = 2**bits - 1
    choose = random.Random(bits)
    powers = [2**power + offset for power in range(1, bits) for offset in (-1, 0, 1)]
    some = [choose.randint(1, 2 ** choose.randint(1, bits) - 1) for _ in range(200)]
    divisors = sorted({1, most - 1, most, *range(1, 100), *powers, *some})
    numbers = []
    for by in divisors:
        last = most // by
        quotients = [0, 1, last, *(choose.randint(0, last) for _ in range(100))]
        around = [quotient * by + offset for quotient in quotients for offset in (-1, 0, 1)]
        numbers.append([min(max(number, 0), most) for number in (*around, most)])
    expected = [
        [(number // by, number % by) for number in row]
        for by, row in zip(divisors, numbers, strict=True)
    ]
    results = torch.full((len(divisors), len(numbers[0]), 2), -1)
    given = {"numbers": torch.tensor(numbers), "results": results, "count": len(numbers[0])}
    cuda_emulator.run("division", ["results"], indices=indices, divisors=divisors, **given)
    assert torch.equal(results, torch.tensor(expected))


def test_places_beyond_31_bits(emulated_operators: torch._ops._OpNamespace) -> None:
    """Of a few elements far apart; the memory between them is never touched."""
    step = 1_100_000_000
    apart = torch.empty(2 * step + 1, dtype=torch.uint8)[::step]
    apart.copy_(torch.tensor([3, 5, 7]))
    factors = torch.tensor([2, 4, 6], dtype=torch.uint8)
    assert emulated_operators.mul(apart, factors).tolist() == [6, 20, 42]


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_any_grid(cuda_emulator: Emulator, blocks: int) -> None:
    a, b = values(9000, dtype=torch.float16), values(9000, dtype=torch.float16)
    agree("mul", emulated_dense(cuda_emulator, "mul", a, b, blocks=blocks), a, b)
    output = torch.empty(9000, dtype=torch.float16)
    agree("mul", emulated_strided(cuda_emulator, "mul", output, a, b, blocks=blocks), a, b)
