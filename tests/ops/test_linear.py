from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import RANGE, SPECIAL_VALUES, refused_dtypes, unary_shapes
from samples import FLOATING, around, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pkg
from pkg.testing import ErrorSample, Sample, ulp

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
# Of input and weight; every way in which they can meet.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 5), (4, 5)),
    ((5,), (4, 5)),
    ((2, 3, 5), (4, 5)),
    ((5,), (5,)),
    ((2, 3, 5), (5,)),
]
EMPTY: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 0), (4, 0)),
    ((0, 5), (4, 5)),
    ((2, 0, 5), (4, 5)),
    ((3, 5), (0, 5)),
    ((0,), (0,)),
]
# Around the register tiles and cache blocks of the product.
TILES = around(4, 6, 8, 12, 16, 32, 48, 64, 128)


def call(
    input: tuple[int, ...],
    weight: tuple[int, ...],
    activation: str | None,
    with_bias: bool = True,
    **options: object,
) -> Sample:
    """With all four arguments."""
    bias = normal(*weight[:-1], seed=2) if with_bias else None
    return Sample((normal(*input), normal(*weight, seed=1), bias, activation), **options)


def calls() -> list[Sample]:
    samples = [
        call(*shapes, activation)
        for shapes in SHAPES[:3]
        for activation in (None, *ACTIVATIONS)
        if shapes == SHAPES[0] or activation in (None, "gelu")
    ]
    samples += [call(*shapes, "silu") for shapes in SHAPES[3:]]
    samples += [call(*SHAPES[0], activation, with_bias=False) for activation in (None, "gelu")]
    samples += [call(*shapes, activation) for shapes in EMPTY for activation in (None, "gelu")]
    for rows, inner, columns in ((3, 4, 5), (7, 6, 2), (20, 17, 33)):
        for activation in ("relu", "gelu_tanh"):
            samples.append(
                call((rows, inner), (columns, inner), activation, family=f"rows, {activation}")
            )
        samples.append(
            call((9, rows, inner), (columns, inner), None, False, family="batch, no bias")
        )
    return samples


def sizes_around_tiles() -> list[Sample]:
    samples = []
    for index, size in enumerate(TILES):
        activation = ACTIVATIONS[index % len(ACTIVATIONS)]
        for rows, inner, columns in ((size, 7, 5), (5, size, 7), (7, 5, size), (size,) * 3):
            samples.append(call((rows, inner), (columns, inner), activation, values_only=True))
        samples.append(call((size,), (300, size), activation, values_only=True))
        samples.append(call((size, 40), (40,), activation, values_only=True))
    return samples


def with_special_values() -> list[Sample]:
    samples = []
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, 1e-300)):
        input = normal(9, 20)
        input[3, 7] = value
        for activation in (None, ACTIVATIONS[index % len(ACTIVATIONS)]):
            arguments = (input, normal(33, 20), normal(33, seed=2), activation)
            samples.append(Sample(arguments, name=str(value), values_only=True))
    # Each value alone through each activation.
    values = SPECIAL_VALUES.unsqueeze(1)
    one = torch.ones(1, 1, dtype=torch.float64)
    samples += [
        Sample(
            (values, one, None, activation),
            name="special",
            values_only=True,
            # BF16 dot products take a denormal number for zero, and relu has its kink there.
            differentiable=activation != "relu",
        )
        for activation in ACTIVATIONS
    ]
    return samples


def wrong_calls() -> list[ErrorSample]:
    input, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    return [
        ErrorSample((input, weight.mT, None, None), match=r"\(2, 3\) and weight of shape \(3, 4\)"),
        ErrorSample((torch.ones(()), weight, None, None), match="input has no dimensions"),
        ErrorSample((input, torch.ones(()), None, None), match=r"weight has shape \(\)"),
        ErrorSample((input, torch.ones(1, 4, 3), None, None), match=r"weight has shape \(1, 4"),
        ErrorSample(
            (input, weight, torch.ones(3), None), match=r"bias has shape \(3,\).*shape \(4,\)"
        ),
        ErrorSample((input, weight, torch.ones(()), None), match=r"bias has shape \(\)"),
        ErrorSample((input, torch.ones(3), torch.ones(1), None), match=r"must have no dimensions"),
        ErrorSample((input, weight.double(), None, None), match="weight is torch.float64 but"),
        ErrorSample((input, weight, bias.half(), None), match="bias is torch.float16 but input is"),
        ErrorSample((input.int(), weight.int(), None, None), match="weight is torch.int32"),
        ErrorSample((input.int(), weight, None, None), match="input is torch.int32; supported"),
        ErrorSample((input, weight, bias.cfloat(), None), match="bias is torch.complex64"),
        ErrorSample((input, weight, bias, "tanh"), match="activation is 'tanh'; supported are"),
        ErrorSample((input, weight, bias, ""), match="activation is ''"),
    ]


class TestLinear(OperatorTests):
    op = torch.ops.pkg.linear.default
    reference = staticmethod(references.linear)
    function = staticmethod(pkg.ops.linear)
    options = MappingProxyType({"autocast": "lower"})

    def samples(self) -> list[Sample]:
        plain = Sample((normal(3, 5), normal(4, 5, seed=1)), name="two arguments")
        return [plain, *calls(), *sizes_around_tiles(), *with_special_values()]

    def errors(self) -> list[ErrorSample]:
        return wrong_calls()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"activation": "tanh"}, "activation is 'tanh'; supported are"),
            ({"bias": torch.ones(1)}, r"bias has shape \(1,\) but must have shape \(4,\)"),
            ({"bias": torch.ones(4, 4)}, r"bias has shape \(4, 4\) but must have shape \(4,\)"),
            ({"bias": torch.ones(4).double()}, "bias is torch.float64 but input is torch.float32"),
            ({"input": torch.ones(5, 3).half()}, "weight is torch.float32 but input is torch.f"),
            ({"input": torch.ones(5, 7)}, "input of shape .* a row of input has 7 elements"),
            ({"weight": torch.ones(2, 4, 2, 3)}, "weight has shape .* but must have shape .out_f"),
        ],
    )
    @pytest.mark.parametrize("records", [False, True])
    def test_a_weight_of_each_slice_is_checked(
        self, device: torch.device, change: dict[str, Any], words: str, records: bool
    ) -> None:
        """As in a call of one slice: what computes the batch would take more."""
        given = {
            "input": torch.ones(5, 3),
            "weight": torch.ones(2, 4, 3),
            "bias": torch.ones(4),
            "activation": "gelu",
        }
        given |= change
        weight = given.pop("weight").to(device).requires_grad_(records)
        input, bias = given["input"].to(device), given["bias"].to(device)
        with pytest.raises(RuntimeError, match=f"linear(_forward)?: {words}"):
            torch.vmap(lambda each: pkg.ops.linear(input, each, bias, given["activation"]))(weight)

    @pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
    def test_is_rounded_once(self, device: torch.device, activation: str | None) -> None:
        # In half precision the sums, the bias and the activation are float32: what is left of
        # their errors is far below the half of a unit that the last rounding costs.
        for dtype in (torch.bfloat16, torch.float16):
            tensors = (normal(40, 64), normal(50, 64, seed=1) / 8, normal(50, seed=2))
            input, weight, bias = (tensor.to(device, dtype) for tensor in tensors)
            exact = references.linear(input.double(), weight.double(), bias.double(), activation)
            error = (pkg.ops.linear(input, weight, bias, activation).double() - exact).abs()
            magnitude = input.double().abs() @ weight.double().abs().mT + bias.double().abs()
            wide = 65 * torch.finfo(torch.float32).eps * magnitude
            assert (error <= 0.5 * ulp(exact, dtype) + wide).all()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_what_is_recorded_is_what_is_not(self, device: torch.device, activation: str) -> None:
        tensors = [normal(9, 20), normal(33, 20, seed=1), normal(33, seed=2)]
        for dtype in FLOATING:
            input, weight, bias = (tensor.to(device, dtype) for tensor in tensors)
            plain = pkg.ops.linear(input, weight, bias, activation)
            recorded = pkg.ops.linear(input, weight.requires_grad_(), bias, activation)
            assert recorded.requires_grad
            assert torch.equal(recorded, plain)

    def test_keeps_and_computes_only_what_is_needed(self, device: torch.device) -> None:
        class Counted(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                self.names = [*getattr(self, "names", []), function._schema.name]
                return function(*args, **(kwargs or {}))

        input, weight = torch.randn(6, 5, device=device), torch.randn(4, 5, device=device)
        bias = torch.randn(4, device=device, requires_grad=True)
        with Counted() as counted:
            pkg.ops.linear(input, weight, bias, "gelu").sum().backward()
        assert "pkg::matmul" not in counted.names
        assert bias.grad is not None
        for activation in (None, "relu"):
            output = torch.ops.pkg.linear_forward(input, weight, bias, activation)
            assert output[1].numel() == 0

    def test_a_relu_passes_no_gradient_of_infinity_through_zero(self, device: torch.device) -> None:
        input = torch.tensor([[-1.0], [2.0]], device=device, requires_grad=True)
        output = pkg.ops.linear(input, torch.ones(1, 1, device=device), None, "relu")
        output.backward(torch.full_like(output, torch.inf))
        assert input.grad is not None
        assert input.grad.tolist() == [[0.0], [torch.inf]]

    @pytest.mark.long
    def test_more_than_two_billion_elements(
        self, device: torch.device, require_memory: Callable[[int], None]
    ) -> None:
        require_memory(2**32)
        input = torch.arange(2**16 + 1, device=device).remainder(97).half().unsqueeze(1)
        weight = torch.arange(2**15, device=device).remainder(11).half().unsqueeze(1)
        bias = torch.full((2**15,), -5.0, device=device, dtype=torch.float16)
        output = pkg.ops.linear(input, weight, bias, "relu")
        assert output.numel() > 2**31
        for row in (0, 2**15, 2**16 - 1, 2**16):
            assert torch.equal(output[row], (input[row] * weight[:, 0] + bias).relu())


class TestActivations:
    """The activations alone: a product of one term with a weight of one is exact."""

    @staticmethod
    def activated(x: Tensor, activation: str) -> Tensor:
        one = torch.ones(1, 1, dtype=x.dtype, device=x.device)
        return pkg.ops.linear(x.unsqueeze(1), one, None, activation).squeeze(1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_gelu_has_all_digits_in_both_tails(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        x = torch.linspace(-13, 13, 20001, dtype=torch.float64).to(device, dtype)
        exact = x.double() * torch.special.erfc(-x.double() * 0.5**0.5) / 2
        normal_numbers = exact.abs() >= torch.finfo(torch.float32).tiny * 16
        error = (self.activated(x, "gelu").double() - exact).abs() / ulp(exact, dtype)
        # csrc/cpu/simd/math.h: Phi is within 8 + 1.25 x^2 half-ulps in float32, which are at most
        # as many ulps of the product; that is rounded, in half precision to 13 or 16 bits fewer.
        bound = 8 + 1.25 * x.double() ** 2
        bound *= torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        assert ((error <= bound + 0.5) | ~normal_numbers).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_silu_has_all_digits_in_both_tails(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        x = torch.linspace(-80, 80, 20001, dtype=torch.float64).to(device, dtype)
        exact = x.double() * torch.sigmoid(x.double())
        error = (self.activated(x, "silu").double() - exact).abs() / ulp(exact, dtype)
        assert error.max() <= (2 * 3 + 0.5 if dtype == torch.float32 else 0.51)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_float64_against_more_digits(self, device: torch.device, activation: str) -> None:
        mpmath = pytest.importorskip("mpmath")
        mpmath.mp.dps = 40

        def exact(x: float) -> float:
            x = mpmath.mpf(x)
            if activation == "relu":
                return max(x, 0)
            if activation == "gelu":
                return x * mpmath.ncdf(x) if x > 0 else x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2
            y = x if activation == "silu" else mpmath.sqrt(8 / mpmath.pi) * (x + 0.044715 * x**3)
            return x / (1 + mpmath.exp(-y))

        x = torch.linspace(-8, 8, 801, dtype=torch.float64)
        results = self.activated(x.to(device), activation).cpu()
        for each, result in zip(x.tolist(), results.tolist(), strict=True):
            wanted = exact(each)
            # exp turns the rounding of its argument, which is |y| at most, into relative error.
            size = 1 + abs(1.6 * (each + 0.045 * each**3) if activation == "gelu_tanh" else 0)
            assert abs(result - wanted) <= 8 * size * 2.0**-52 * abs(wanted)


class TestLinearForward(OperatorTests):
    op = torch.ops.pkg.linear_forward.default
    reference = staticmethod(references.linear_forward)
    # Values are compared of all samples. These checks TestLinear makes of every one of the same
    # calls, by the same kernel: here a third, with each activation and empty tensors among them.
    one_of = MappingProxyType(dict.fromkeys(("layouts", "fake", "compile", "vmap"), 3))

    def samples(self) -> list[Sample]:
        return [*calls(), *sizes_around_tiles()[::7], *with_special_values()[:6]]

    def errors(self) -> list[ErrorSample]:
        return wrong_calls()


class TestLinearActivationBackward(OperatorTests):
    op = torch.ops.pkg.linear_activation_backward.default
    reference = staticmethod(references.linear_activation_backward)

    def samples(self) -> list[Sample]:
        def sample(z: Tensor, activation: str, name: str = "", **options: object) -> Sample:
            return Sample((normal(*z.shape, seed=1), z, activation), name=name, **options)

        samples = []
        for activation in ACTIVATIONS:
            samples += [
                sample(normal(3, 4), activation, family=activation),
                sample(normal(6, 35) * 3, activation, family=activation),
                sample(normal(), activation, name="no dimension"),
                sample(normal(3, 0, 2), activation, name="empty"),
                sample(SPECIAL_VALUES, activation, name="special", values_only=True),
                sample(RANGE, activation, name="whole range", values_only=True),
            ]
        for index, shape in enumerate(unary_shapes()):
            activation = ACTIVATIONS[index % len(ACTIVATIONS)]
            samples.append(sample(normal(*shape), activation, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        one = torch.ones(3)
        name = "linear_activation_backward"
        refused = [
            ErrorSample((*wrong.args, "gelu"), match=wrong.match)
            for wrong in refused_dtypes(name, "saved", one)
        ]
        return [
            *refused,
            ErrorSample((one.long(), one, "gelu"), match=f"{name}: grad is torch.int64"),
            ErrorSample((one.half(), one, "gelu"), match="grad is torch.float16 but saved is"),
            ErrorSample((one, torch.ones(4), "silu"), match=r"grad has shape \(3,\) but saved"),
            ErrorSample((one, one, "elu"), match="activation is 'elu'"),
        ]
