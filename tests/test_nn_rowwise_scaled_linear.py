"""pkg.nn.RowwiseScaledLinear: what it computes, how far that is from the layer, and its state."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from samples import FLOATING
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pkg


def expected(module: pkg.nn.RowwiseScaledLinear, input: Tensor) -> tuple[Tensor, Tensor]:
    """The product of what both were quantised to, in float64, and the bias: its two terms."""
    values, scale = pkg.ops.quantize_rowwise(input, module.activation_bits)
    values = pkg.ops.unpack_int4(values) if module.activation_bits == 4 else values
    sums = values.double() @ pkg.ops.unpack_int4(module.weight).double().mT  # of integers: exact
    scaled = sums * scale.double()[..., None] * module.weight_scale.double()
    return scaled, torch.zeros(()) if module.bias is None else module.bias.double()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_multiplies_what_it_quantised(device: torch.device, bits: int, bias: bool) -> None:
    for dtype in FLOATING:
        linear = torch.nn.Linear(70, 33, bias, device, dtype)
        module = pkg.nn.RowwiseScaledLinear.from_linear(linear, bits)
        for shape in ((70,), (1, 70), (9, 70), (2, 0, 70), (3, 5, 70)):
            input = torch.randn(shape, device=device, dtype=dtype)
            result = module(input)
            assert result.dtype == dtype
            product, added = expected(module, input)
            exact = product + added
            # Five roundings on the way, as many in the reference, and that to the output.
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            relative = 10 * torch.finfo(wide).eps / 2 + torch.finfo(dtype).eps / 2
            bound = relative * (product.abs() + added.abs())
            bound += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert ((result.double() - exact).abs() <= bound).all()


def test_the_weight_is_off_by_at_most_half_a_step(device: torch.device) -> None:
    linear = torch.nn.Linear(128, 40, device=device)
    module = pkg.nn.RowwiseScaledLinear.from_linear(linear)
    weight = pkg.ops.unpack_int4(module.weight) * module.weight_scale[:, None]
    steps = linear.weight.abs().amax(1, keepdim=True) / 7.5
    assert ((weight - linear.weight).abs() <= 0.5001 * steps).all()
    assert module.weight.nbytes * 8 == linear.weight.nbytes


@pytest.mark.parametrize(("bits", "most"), [(8, 0.081), (4, 0.165)])
def test_the_error_of_a_layer_is_that_of_its_steps(
    device: torch.device, bits: int, most: float
) -> None:
    """Uniform weights: a step of a 7.5th leaves an error of 1/7.5/sqrt(12) of their largest.

    That is 0.067 of their deviation, 1/sqrt(3); of normal rows, whose largest of 512 values is
    3.2 deviations, 4 bits leave about 0.12 and 8 bits 0.007. Errors add as squares; a fifth more.
    """
    linear = torch.nn.Linear(512, 256, bias=False, device=device)
    module = pkg.nn.RowwiseScaledLinear.from_linear(linear, bits)
    input = torch.randn(64, 512, device=device)
    exact = linear(input)
    assert (module(input) - exact).norm() / exact.norm() < most


def test_state_is_saved_and_loaded(device: torch.device) -> None:
    for bias in (True, False):
        module = pkg.nn.RowwiseScaledLinear.from_linear(
            torch.nn.Linear(20, 33, bias, device=device), 4
        )
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = pkg.nn.RowwiseScaledLinear(20, 33, bias, 4, device)
        other.load_state_dict(torch.load(file))
        assert list(module.state_dict()) == ["weight", "weight_scale", *(["bias"] if bias else [])]
        input = torch.randn(5, 20, device=device)
        assert torch.equal(other(input), module(input))
        assert torch.equal(copy.deepcopy(module)(input), module(input))
        assert not list(module.parameters())


def test_a_move_to_another_dtype_keeps_the_integers(device: torch.device) -> None:
    module = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33, device=device))
    moved = copy.deepcopy(module).to(torch.bfloat16)
    assert torch.equal(moved.weight, module.weight)
    assert moved.weight_scale.dtype == torch.bfloat16
    assert moved(torch.randn(5, 20, device=device, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_decides_the_output(device: torch.device) -> None:
    module = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33, device=device))
    input = torch.randn(5, 20, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        result = module(input)
        assert module(input.double()).dtype == torch.float64
    assert torch.equal(result, module(input).bfloat16())


@pytest.mark.tracing
def test_compile_and_export_use_the_operators(device: torch.device) -> None:
    module = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33, device=device))
    input = torch.randn(6, 20, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(input), module(input))
    program = torch.export.export(module, (input,))
    assert torch.equal(program.module()(input), module(input))
    targets = {node.target for node in program.graph.nodes}
    assert torch.ops.pkg.rowwise_scaled_linear_s8s4.default in targets
    assert torch.equal(torch.func.vmap(module)(input), module(input))


def test_refuses_in_words() -> None:
    with pytest.raises(ValueError, match="in_features is 5; it must be even"):
        pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(5, 3))
    with pytest.raises(ValueError, match="activation_bits is 2; it must be 4 or 8"):
        pkg.nn.RowwiseScaledLinear(4, 3, activation_bits=2)
    module = pkg.nn.RowwiseScaledLinear(4, 3)
    assert repr(module) == (
        "RowwiseScaledLinear(in_features=4, out_features=3, bias=True, activation_bits=8)"
    )
    with pytest.raises(RuntimeError, match="do not match: a row of input has 6 values"):
        module(torch.randn(2, 6))
    with pytest.raises(
        TypeError, match="RowwiseScaledLinear: input is None; it must be a floating"
    ):
        module(None)
    for wrong, words in ((None, "None"), (torch.nn.ReLU(), "of type ReLU")):
        with pytest.raises(TypeError, match=rf"module is {words}; it must be a torch\.nn\.Linear"):
            pkg.nn.RowwiseScaledLinear.from_linear(wrong)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_on_the_meta_device(device: torch.device, bits: int) -> None:
    layer = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33, device=device), bits)
    with torch.device("meta"):
        empty = pkg.nn.RowwiseScaledLinear(20, 33, activation_bits=bits)
        converted = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33), bits)
    inputs = torch.randn(2, 3, 20, device="meta", dtype=torch.bfloat16)
    for module in (empty, converted, copy.deepcopy(layer).to("meta")):
        result = module(inputs)
        assert result.shape == (2, 3, 33)
        assert result.is_meta
        assert result.dtype == torch.bfloat16
        assert module.half().weight.dtype == torch.int8
    input = torch.randn(5, 20, device=device)
    filled = empty.float().to_empty(device=device)
    filled.load_state_dict(layer.state_dict())
    converted.load_state_dict(layer.state_dict(), assign=True)
    for module in (filled, converted):
        assert torch.equal(module(input), layer(input))
    with pytest.raises(RuntimeError, match="the tensors are on meta"):
        layer(inputs)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        layer = pkg.nn.RowwiseScaledLinear.from_linear(torch.nn.Linear(20, 33))
        result = layer(torch.ones(3, 20, dtype=torch.float16))
    assert isinstance(result, FakeTensor)
    assert result.shape == (3, 33)
    assert result.dtype == torch.float16
