from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from operator_tests import OperatorTests
from rowwise_scaled_samples import rows_near_ties
from samples import FLOATING, around, normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pkg
from pkg.testing import ErrorSample, Sample


def _rows(kind: str, rows: int, inner: int) -> Tensor:
    """float64 rows of a distribution."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (rows, inner), torch.float64
    if kind == "uniform":
        return torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1
    if kind == "Laplace":
        half = torch.rand(shape, generator=generator, dtype=dtype) - 0.5
        return -half.sign() * torch.log1p(-2 * half.abs())
    values = torch.randn(shape, generator=generator, dtype=dtype)
    if kind == "relu":
        values = values.relu()
        values[:, 0] += 1  # no row is zero
    elif kind == "Student's t":
        squares = torch.randn((4, *shape), generator=generator, dtype=dtype).square().sum(0)
        values /= (squares / 4).sqrt()
    return values


def _relative_error(result: Tensor, exact: Tensor) -> float:
    squares = (result - exact).square().sum(-1) / exact.square().sum(-1)
    return float(squares.mean().sqrt())


def _error(input: Tensor, bits: int) -> float:
    values, scale = pkg.ops.quantize_rowwise(input, bits)
    values = pkg.ops.unpack_int4(values) if bits == 4 else values
    return _relative_error(values * scale.unsqueeze(-1), input)


class TestQuantizeRowwise(OperatorTests):
    op = torch.ops.pkg.quantize_rowwise.default
    function = staticmethod(pkg.ops.quantize_rowwise)
    options = MappingProxyType({"without": {"gradients"}})

    @staticmethod
    def reference(input: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
        least, most = (-127, 127) if bits == 8 else (-8, 7)
        wide = input if input.dtype == torch.float64 else input.float()
        up, down = (
            each.amax(-1).clamp(min=0) if input.shape[-1] else wide.new_zeros(input.shape[:-1])
            for each in (wide, -wide)
        )
        if bits == 8:
            scale = torch.maximum(up, down) / most
        else:
            # The larger side gets the eight negative values, by the sign of the scale.
            larger, other = torch.maximum(up, down), torch.minimum(up, down)
            scale = torch.maximum(larger / 8, other / 7.5) * torch.where(down >= up, 1, -1)
        scale = scale.to(input.dtype)
        divisor = scale.to(wide.dtype).unsqueeze(-1)
        values = (wide / divisor).clamp(least, most).round()
        values = torch.where((divisor != 0) & divisor.isfinite(), values, 0).to(torch.int8)
        return (pkg.ops.pack_int4(values) if bits == 4 else values), scale

    def samples(self) -> list[Sample]:
        samples = [
            Sample((normal(3, 6),), family="matrix"),
            Sample((normal(7, 10),), family="matrix"),
            Sample((normal(40, 34),), family="matrix"),
            Sample((normal(3, 6), 4)),
            Sample((normal(5),)),
            Sample((normal(2, 3, 4), 4)),
            Sample((normal(0, 4),)),
            Sample((normal(3, 0),)),
            Sample((normal(3, 0), 4)),
            Sample((torch.zeros(3, 4).double(),)),
        ]
        for size in around(4, 8, 16, 32, 64, 128, 2048):
            samples.append(Sample((normal(3, size),), values_only=True))
            samples.append(Sample((normal(3, 2 * size), 4), values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        return [
            ErrorSample((torch.ones(2, 4).int(),), match="input is torch.int32"),
            ErrorSample((torch.ones(()),), match="input has no dimensions"),
            ErrorSample((torch.ones(2, 4), 2), match="bits is 2; it must be 4 or 8"),
            ErrorSample((torch.ones(2, 5), 4), match="has 5 elements in a row; with 4 bits"),
        ]

    @pytest.mark.parametrize("bits", [4, 8])
    def test_no_value_is_off_by_more_than_half_a_step(
        self, device: torch.device, bits: int
    ) -> None:
        for dtype in FLOATING:
            input = normal(50, 130).to(dtype).to(device)
            values, scale = pkg.ops.quantize_rowwise(input, bits)
            values = pkg.ops.unpack_int4(values) if bits == 4 else values
            steps = scale.double().unsqueeze(-1)
            error = (values.double() * steps - input.double()).abs()
            # A scale that is rounded down leaves the largest value out by that much more.
            most = 127 if bits == 8 else 8
            assert (error <= (0.5 + most * torch.finfo(dtype).eps) * steps.abs()).all()
            assert values.abs().max() == most
            if bits == 4:
                assert values.max() == 7
                assert (scale < 0).any()
                assert (scale > 0).any()

    @pytest.mark.parametrize("kind", ["normal", "uniform", "Laplace", "Student's t", "relu"])
    @pytest.mark.parametrize("inner", [8, 64, 1024, 4096, 16384])
    def test_four_bits_err_less_than_a_seventh_of_the_largest(
        self, device: torch.device, kind: str, inner: int
    ) -> None:
        """A step was a 7th of the largest magnitude and is a 7.5th at most, and errors with it.

        Of the mean over many rows; two hundredths more, since that is a sample.
        """
        input = _rows(kind, 400_000 // inner, inner).to(device)
        largest = input.abs().amax(-1, keepdim=True)
        former = (input / (largest / 7)).round() * (largest / 7)
        assert _error(input, 4) <= 1.02 * 7 / 7.5 * _relative_error(former, input)

    def test_four_bits_of_a_row_with_one_outlier(self, device: torch.device) -> None:
        """The outlier is exact, as it was, and the steps are 7 / 8 of what they were at most."""
        for inner in (8, 64, 4096):
            for outlier in (100.0, -100.0):
                input = _rows("normal", 200, inner).to(device)
                input[:, 3] = outlier
                values, scale = pkg.ops.quantize_rowwise(input, 4)
                assert (pkg.ops.unpack_int4(values)[:, 3] == -8).all()
                assert (scale == -outlier / 8).all()
                former = (input * (7 / 100)).round() * (100 / 7)
                assert _error(input, 4) <= _relative_error(former, input)

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_special_values_stay_in_their_row(
        self, device: torch.device, value: float, bits: int
    ) -> None:
        for dtype in FLOATING:
            for position in (0, 5, 33, 69):
                input = -torch.ones(3, 70, dtype=dtype, device=device)
                input[1, position] = value
                values, scale = pkg.ops.quantize_rowwise(input, bits)
                values = pkg.ops.unpack_int4(values) if bits == 4 else values
                expected = torch.tensor(value, dtype=dtype).abs()
                if bits == 4:
                    expected *= -1 if value > 0 else 1
                torch.testing.assert_close(scale[1].cpu(), expected, equal_nan=True)
                assert (values[1] == 0).all()
                assert (values[::2] == (-8 if bits == 4 else -127)).all()

    def test_halves_round_to_even(self, device: torch.device) -> None:
        input = torch.tensor([[127, 0.5, 1.5, -2.5, 126.5, -0.5]], device=device)
        values, scale = pkg.ops.quantize_rowwise(input)
        assert scale.tolist() == [1.0]
        assert values.tolist() == [[127, 0, 2, -2, 126, 0]]

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("exponents", [4, 50, 120])
    def test_quotients_are_those_of_a_division(
        self, device: torch.device, bits: int, exponents: int
    ) -> None:
        input = rows_near_ties(2000, 258, bits, exponents).to(device)
        values, scale = pkg.ops.quantize_rowwise(input, bits)
        # Of a CUDA tensor PyTorch makes a division by a number of Python's a product with its
        # reciprocal, which is another number in one of twenty of these rows.
        expected = self.reference(input.cpu(), bits)
        assert torch.equal(scale.cpu(), expected[1])
        assert torch.equal(values.cpu(), expected[0])

    def test_a_gradient_is_refused(self, device: torch.device) -> None:
        input = torch.ones(2, 4, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="quantize_rowwise: an argument requires grad"):
            pkg.ops.quantize_rowwise(input)
        assert not pkg.ops.quantize_rowwise(input.detach())[1].requires_grad


def test_pack_int4_and_its_inverse(device: torch.device) -> None:
    every = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(device)
    for dtype in (torch.int8, torch.int32, torch.int64):
        packed = pkg.ops.pack_int4(every.to(dtype))
        assert packed.dtype == torch.int8
        assert packed.shape == (256, 1)
        expected = [(high & 15) << 4 | low & 15 for low, high in every.tolist()]
        assert packed.view(torch.uint8).flatten().tolist() == expected
        assert torch.equal(pkg.ops.unpack_int4(packed), every.to(torch.int8))
        assert torch.equal(pkg.ops.unpack_int4(packed.view(torch.uint8)), every.to(torch.int8))
    assert pkg.ops.pack_int4(torch.ones(3, 0).int()).shape == (3, 0)
    natural = torch.cartesian_prod(torch.arange(8), torch.arange(8)).to(device)
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        assert torch.equal(pkg.ops.pack_int4(natural.to(dtype)), pkg.ops.pack_int4(natural))


def test_pack_int4_under_vmap(device: torch.device) -> None:
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(device)
    expected = pkg.ops.pack_int4(values)
    for each in (values, values.view(2, 128, 2)):
        packed = torch.vmap(pkg.ops.pack_int4)(each)
        assert torch.equal(packed.flatten(), expected.flatten())
    with pytest.raises(RuntimeError, match="elements that are -7 to 8"):
        torch.vmap(torch.vmap(pkg.ops.pack_int4))(1 + values.view(2, 128, 2))


def test_pack_int4_refuses_in_words() -> None:
    for wrong, words in (
        (torch.ones(4), "values is torch.float32"),
        (torch.tensor([1, 8]), "elements that are 1 to 8; they must lie between -8 and 7"),
        (torch.tensor([-9, 0]), "elements that are -9 to 0; they must"),
        (torch.tensor([1, 65535], dtype=torch.uint16), "elements that are 1 to 65535"),
        (torch.tensor([1, 2**32 - 1], dtype=torch.uint32), "elements that are 1 to 4294967295"),
        (
            torch.tensor([1, 2**64 - 1], dtype=torch.uint64),
            "elements that are 1 to 9223372036854775",
        ),
        (torch.tensor([1, 2, 3]), "last dimension must be even"),
        (torch.tensor(1), "last dimension must be even"),
    ):
        with pytest.raises(RuntimeError, match=words):
            pkg.ops.pack_int4(wrong)
    with pytest.raises(RuntimeError, match=r"packed is torch\.int32"):
        pkg.ops.unpack_int4(torch.ones(3).int())
    with pytest.raises(RuntimeError, match="packed has no dimensions"):
        pkg.ops.unpack_int4(torch.tensor(3).char())
    with pytest.raises(TypeError, match="pack_int4: values is None; it must be a tensor of an int"):
        pkg.ops.pack_int4(None)
    with pytest.raises(TypeError, match="unpack_int4: packed is None; it must be a tensor of int8"):
        pkg.ops.unpack_int4(None)
    with pytest.raises(TypeError, match="values is of type list; it must be"):
        pkg.ops.pack_int4([1, 2])


class PackInt4(torch.nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return pkg.ops.pack_int4(values)


@pytest.mark.tracing
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint64, torch.int64], ids=str)
@pytest.mark.parametrize("way", ["aot_eager", "inductor", "export", "strict export"])
def test_pack_int4_in_a_graph(dtype: torch.dtype, way: str) -> None:
    """The program has the function's results, and refuses what it refuses."""
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    if not dtype.is_signed:
        values = values.clamp(min=0)
    values = values.to(dtype)
    module = PackInt4()
    if "export" in way:
        shapes = ({0: torch.export.Dim("rows")},)
        program = torch.export.export(
            module, (values,), dynamic_shapes=shapes, strict=way != "export"
        )
        module = program.module()
    else:
        module = torch.compile(module, fullgraph=True, dynamic=True, backend=way)
    for part in (values, values[3:20], values[:2]):
        assert torch.equal(module(part), pkg.ops.pack_int4(part))
    for wrong in (8, -9) if dtype.is_signed else (8, 250):
        with pytest.raises(RuntimeError, match="values has elements that are out of range"):
            module(torch.tensor([[1, 2], [wrong, 3]]).to(dtype))


@pytest.mark.tracing
def test_pack_int4_of_what_has_no_values() -> None:
    with FakeTensorMode():
        packed = pkg.ops.pack_int4(torch.ones(3, 4, dtype=torch.int32))
    assert isinstance(packed, FakeTensor)
    assert packed.shape == (3, 2)
    assert pkg.ops.pack_int4(torch.ones(3, 4, dtype=torch.int32, device="meta")).is_meta
