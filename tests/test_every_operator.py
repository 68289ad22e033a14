"""No operator without a test, a kernel for each device, and a function in each place."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from operator_collection import operator_classes, public_operators, registered_operators
from operator_tests import OperatorTests
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pkg
from pkg.testing.layouts import LAYOUTS, Layout
from pkg.testing.samples import Sample

SOURCES = Path(__file__).parents[1]
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def has_kernel(operator: str, *keys: str) -> bool:
    name = f"pkg::{operator}"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def test_every_operator_is_tested() -> None:
    assert set(operator_classes()) == registered_operators()


def test_no_class_replaces_or_skips_the_test() -> None:
    for tested in operator_classes().values():
        assert tested.test_check is OperatorTests.test_check
        assert tested.pytest_generate_tests is OperatorTests.pytest_generate_tests
        assert not hasattr(tested, "pytestmark")


@pytest.mark.parametrize("operator", sorted(registered_operators()))
def test_every_operator_has_a_kernel_for_each_device(operator: str) -> None:
    assert has_kernel(operator, "CPU", *COMPOSITE)
    assert has_kernel(operator, "Meta", *COMPOSITE)
    if pkg._loader.cuda_library:
        assert has_kernel(operator, "CUDA", *COMPOSITE)


def test_the_public_functions_are_operators_and_the_reverse() -> None:
    assert public_operators() == sorted(pkg.ops.__all__)
    parts = registered_operators() - set(public_operators())
    # An operator that is not public is a part of one that is, or one of attention's helpers.
    for part in parts:
        assert part == "attention_dropout_mask" or any(
            part.startswith(f"{operator}_") for operator in public_operators()
        )


@pytest.mark.parametrize("operator", public_operators())
def test_public_functions_take_what_the_schema_says(operator: str) -> None:
    schema = getattr(torch.ops.pkg, operator).default._schema
    parameters = inspect.signature(getattr(pkg.ops, operator)).parameters.values()
    assert [parameter.name for parameter in parameters] == [a.name for a in schema.arguments]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            default = argument.default_value
            # A number for a list of a fixed length stands for that many of it.
            pair = isinstance(default, list) and default == [parameter.default] * len(default)
            assert pair or parameter.default == default


@pytest.mark.parametrize("operator", public_operators())
def test_one_operator_has_one_name_in_every_room(operator: str) -> None:
    # The package may be an installed one, away from the sources.
    rooms = {
        SOURCES: ("csrc/cpu/{}*.cpp", "csrc/cuda/{}*.cu", "tests/ops/test_{}.py"),
        Path(pkg.__file__).parent: ("ops/{}.py",),
    }
    for folder, places in rooms.items():
        for place in places:
            assert list(folder.glob(place.format(operator))), place.format(operator)


def forms_on(device: str, operator: str, sample: Sample, layout: Layout) -> list[object]:
    """Sizes, strides and dtypes of the results that tensors without memory have there."""

    def placed(tensor: Tensor) -> Tensor:
        strides = layout.strides(tensor.shape)
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)

    with FakeTensorMode():
        given = sample.map_tensors(placed)
        returned = getattr(torch.ops.pkg, operator).default(*given.args, **given.kwargs)
    results = returned if isinstance(returned, (tuple, list)) else [returned]
    tensors = [result for result in results if isinstance(result, Tensor)]
    assert {result.device.type for result in tensors} <= {device}
    return [(result.shape, result.stride(), result.dtype) for result in tensors]


@pytest.mark.parametrize("operator", sorted(registered_operators()))
def test_results_are_laid_out_alike_on_every_device(operator: str) -> None:
    """A tensor of the meta device stands for one of any, and so does what is told of its results.

    check_op holds the kernels of each device that is there to this.
    """
    for sample in operator_classes()[operator]().samples():
        if not sample.values_only:
            single = sample.converted(torch.float32)
            for layout in LAYOUTS:
                of_cpu, *others = (
                    forms_on(device, operator, single, layout) for device in ("cpu", "cuda", "meta")
                )
                assert others == [of_cpu, of_cpu], f"{sample}, {layout.name}"


@pytest.mark.parametrize(
    "operator",
    [
        *("linear", "linear_forward", "int4_linear", "quantize_rowwise"),
        *("dequantize_tensor_core_tiled_layout", "unpack_tensor_core_tiled_layout"),
    ],
)
def test_wrong_shapes_and_options_are_refused_without_values(operator: str) -> None:
    """So that no program is exported which can never run. Dtypes are left to the kernels."""
    refused = 0
    for wrong in operator_classes()[operator]().errors():
        if wrong.move and "torch." not in wrong.match:
            given = wrong.to(torch.device("meta"))
            with pytest.raises(wrong.error, match=wrong.match):
                getattr(torch.ops.pkg, operator).default(*given.args, **given.kwargs)
            refused += 1
    assert refused


def test_attention_and_correlation_refuse_without_values() -> None:
    tokens, images = torch.empty(1, 5, 4, device="meta"), torch.empty(1, 2, 6, 6, device="meta")
    for mask, is_causal, match in (
        (torch.empty(9, 9, device="meta"), False, "does not broadcast to the scores"),
        (torch.empty(5, 5, device="meta"), True, "exclude each other"),
    ):
        with pytest.raises(RuntimeError, match=match):
            pkg.ops.scaled_dot_product_attention(tokens, tokens, tokens, mask, 0.0, is_causal)
    correlate = torch.ops.pkg.spatial_correlation_sample.default
    for option, match in (([3], "patch_size has 1 elements"), ([3, 0], "patch_size is")):
        with pytest.raises(RuntimeError, match=match):
            correlate(images, images, [1, 1], option)


def test_a_program_that_cannot_run_is_not_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return pkg.ops.linear(input, weight, bias)

    with pytest.raises(RuntimeError, match="bias has shape"):
        torch.export.export(Layer(), (torch.ones(2, 3), torch.ones(5, 3), torch.ones(7)))


@pytest.mark.tracing
@pytest.mark.parametrize("operator", sorted(registered_operators()))
def test_vmap_over_no_slices(operator: str) -> None:
    """The results are of the shapes and dtypes of those over two slices."""
    tested = operator_classes()[operator]()
    for sample in tested.samples():
        if sample.values_only:
            continue
        single = sample.converted(torch.float32)
        count = len(single.tensors)
        ways: list[tuple[int | None, ...]] = [
            (0,) * count,
            tuple(tensor.dim() for tensor in single.tensors),
        ]
        if "mutates" not in tested.options:
            ways += [tuple(0 if i == one else None for i in range(count)) for one in range(count)]
        for in_dims in ways:
            none, two = (
                [(result.shape, result.dtype) for result in mapped(operator, single, in_dims, size)]
                for size in (0, 2)
            )
            wanted = [((0, *shape[1:]), dtype) for shape, dtype in two]
            assert none == wanted, f"{sample}, in_dims {in_dims}"


def mapped(
    operator: str, sample: Sample, in_dims: tuple[int | None, ...], size: int
) -> list[Tensor]:
    """The results of an operator under vmap over so many slices, all of one sample."""
    tensors = [
        tensor if dim is None else torch.stack([tensor] * 2, dim).narrow(dim, 0, size)
        for tensor, dim in zip(sample.tensors, in_dims, strict=True)
    ]

    def call(*slices: Tensor) -> list[Tensor]:
        given = sample.with_tensors(slices)
        returned = getattr(torch.ops.pkg, operator).default(*given.args, **given.kwargs)
        results = returned if isinstance(returned, (tuple, list)) else [returned]
        return [result for result in results if isinstance(result, Tensor)]

    results: list[Tensor] = torch.func.vmap(call, in_dims=in_dims, randomness="different")(*tensors)
    return results


def test_results_over_no_slices_depend_on_the_arguments() -> None:
    """Weights of their own for each slice make a call of each: of none, gradients are zero."""
    input, h, cell = torch.randn(2, 3, requires_grad=True), torch.randn(2, 4), torch.randn(2, 4)
    weights, bias = torch.randn(0, 12, 7, requires_grad=True), torch.randn(12)
    new_h, _ = torch.func.vmap(pkg.ops.lltm, (None, 0, None, None, None))(
        input, weights, bias, h, cell
    )
    new_h.sum().backward()
    assert input.grad is not None
    assert weights.grad is not None
    assert torch.equal(input.grad, torch.zeros_like(input))
    assert weights.grad.shape == weights.shape
