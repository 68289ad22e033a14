"""What no operator takes is refused in words that name the argument, whichever way it is called."""

from __future__ import annotations

import fractions
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from operator_collection import operator_classes, public_operators, registered_operators
from torch import Tensor

import pkg
from pkg.testing import Sample

OPERATORS = public_operators()


def ways_of(operator: str) -> dict[str, Callable[..., Any]]:
    ways = {
        "pkg._C": getattr(pkg._C, operator),
        "torch.ops": getattr(torch.ops.pkg, operator).default,
    }
    # One that is a part of others is no function of pkg.ops.
    return ways | ({"pkg.ops": getattr(pkg.ops, operator)} if operator in OPERATORS else {})


def calls_of(operator: str) -> Iterator[dict[str, Any]]:
    """The samples of an operator, as arguments by name."""
    schema = getattr(torch.ops.pkg, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    for sample in operator_classes()[operator]().samples():
        sample = sample.converted(torch.float32)
        given = dict(zip(names, sample.args, strict=False)) | dict(sample.kwargs)
        yield dict(Sample(kwargs=given).copy().kwargs)


def arguments_of(operator: str) -> dict[str, Any]:
    """A call's arguments by name, one of each kind that some sample of the operator has."""
    calls = (call for call in calls_of(operator) if all(t.numel() for _, t in tensors_of(call)))
    return max(calls, key=len)


def tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value


def has_elements(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


@pytest.mark.parametrize("operator", sorted(registered_operators()))
def test_a_tensor_whose_storage_was_freed(operator: str) -> None:
    calls = list(calls_of(operator))
    schema = getattr(torch.ops.pkg, operator).default._schema
    # A part may speak for the operator that it is a part of.
    spoken_for = operator.removesuffix("_backward").removesuffix("_forward")
    for name in (argument.name for argument in schema.arguments if "Tensor" in str(argument.type)):
        arguments = next(call for call in calls if has_elements(call.get(name)))
        tensor = arguments[name]
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        behind = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
        view = behind[8:].view(tensor.shape)
        behind.untyped_storage().resize_(0)
        for function, without_memory in itertools.product(
            ways_of(operator).values(), (freed, view)
        ):
            with pytest.raises(RuntimeError, match=f"{spoken_for}\\w*: {name} .*has no memory"):
                function(**arguments | {name: without_memory})


def test_a_freed_tensor_without_elements_is_as_any_other() -> None:
    empty = torch.empty(0, 3)
    empty.untyped_storage().resize_(0)
    assert pkg.ops.mul(empty, empty).shape == (0, 3)
    assert pkg.ops.matmul(empty, torch.ones(3, 2)).shape == (0, 2)


WRONG = [1.5, "text", [1.0], [torch.ones(2)], np.ones(3), torch.float32, object()]


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_no_tensor(operator: str) -> None:
    arguments = arguments_of(operator)
    schema = getattr(torch.ops.pkg, operator).default._schema
    optional = {a.name for a in schema.arguments if str(a.type).startswith("Optional")}
    for name, _ in tensors_of(arguments):
        for way in ("pkg.ops", "pkg._C"):
            function = ways_of(operator)[way]
            for wrong in [*WRONG, *([] if name in optional else [None])]:
                with pytest.raises(
                    TypeError, match=f"{operator}: {name} is .*; it must be a torch"
                ):
                    function(**arguments | {name: wrong})
        # Without any tensor PyTorch does not get as far as to a kernel.
        if name not in optional and len(list(tensors_of(arguments))) > 1:
            message = f"{name} is None; it must be a torch.Tensor"
            with pytest.raises((RuntimeError, TypeError), match=message):
                ways_of(operator)["torch.ops"](**arguments | {name: None})


def exotic(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "a sparse tensor", tensor.to_sparse()
    if tensor.dtype == torch.float32:
        yield "an mkldnn tensor", tensor.to_mkldnn()
        yield "a quantised tensor", torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        yield "a nested tensor", torch.nested.nested_tensor([tensor, tensor])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_of_another_kind(operator: str) -> None:
    arguments = arguments_of(operator)
    for name, tensor in tensors_of(arguments):
        for kind, wrong in exotic(tensor):
            for way in ("pkg.ops", "pkg._C"):
                with pytest.raises(RuntimeError) as error:
                    ways_of(operator)[way](**arguments | {name: wrong})
                assert f"{operator}: {name} is {kind}" in str(error.value)
                assert "; c" in str(error.value)  # convert it, call ...
                assert ".cpp" not in str(error.value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_number_is_no_bool_and_a_bool_no_number(operator: str) -> None:
    arguments = arguments_of(operator)
    schema = getattr(torch.ops.pkg, operator).default._schema
    wrong_for = {
        "bool": [0, 1, 0.125, "yes", None, torch.tensor(1), np.int64(1)],
        "int": [True, 1.5, "1", torch.tensor(1.5), np.True_, fractions.Fraction(3, 2)],
        "float": [True, "1", 1j, torch.tensor(True), np.True_, torch.ones(2)],
        "str": [1, True, b"relu", torch.ones(())],
        "ScalarType": [1, "float32", np.float32, True],
        "List[int]": ["12", (1.5, 2), (True, 2), [None, 1]],
    }
    for argument in schema.arguments:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        kind = "List[int]" if kind.startswith("List[") else kind
        for way in ("pkg.ops", "pkg._C"):
            for wrong in wrong_for.get(kind, []):
                with pytest.raises(
                    TypeError, match=f"{operator}: {argument.name} is .*; it must be"
                ):
                    ways_of(operator)[way](**arguments | {argument.name: wrong})


def test_what_stands_for_a_number_is_one() -> None:
    a = torch.ones(2)
    expected = torch.full((2,), 3.0)
    for two in (2, 2.0, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0)):
        assert torch.equal(pkg.ops.muladd(a, a, two), expected)
    query = torch.ones(1, 1, 3, 2)
    causal = pkg.ops.scaled_dot_product_attention(query, query, query, is_causal=True)
    for yes in (np.True_, torch.tensor(True)):
        attend = pkg.ops.scaled_dot_product_attention
        assert torch.equal(attend(query, query, query, is_causal=yes), causal)


def test_what_a_transform_follows_is_no_number() -> None:
    a, numbers = torch.ones(4), torch.ones(4)
    words = "muladd: c is a tensor of shape .*inside a transform of torch.func; it must be a float"
    with pytest.raises(TypeError, match=words):
        torch.vmap(pkg.ops.muladd)(a, a, numbers)
    with pytest.raises(TypeError, match=words):
        torch.func.jvp(lambda c: pkg.ops.muladd(a, a, c), (numbers[0],), (numbers[0],))


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz],
    ids=str,
)
def test_dtypes_of_eight_bits_are_named(dtype: torch.dtype) -> None:
    a = torch.ones(2, 2).to(dtype)
    for operator in (pkg.ops.mul, pkg.ops.matmul):
        with pytest.raises(RuntimeError, match=f"{operator.__name__}: a is {dtype}; supported"):
            operator(a, a)


def test_an_integer_beyond_64_bits_is_refused() -> None:
    a = torch.ones(2, 2)
    with pytest.raises((RuntimeError, TypeError, OverflowError)):
        pkg.ops.quantize_rowwise(a, 2**70)


def test_a_proxy_goes_into_the_graph() -> None:
    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return pkg.ops.matmul(pkg.ops.mul(a, b), b)

    graph = torch.fx.symbolic_trace(Module())
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == ["pkg.mul.default", "pkg.matmul.default"]
    a = torch.rand(3, 3)
    assert torch.equal(graph(a, a), Module()(a, a))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_refused_is_refused_beside_a_gradient_too(operator: str) -> None:
    """By the same words, though another operator may record it."""
    tests = operator_classes()[operator]()
    function = getattr(pkg.ops, operator)
    for wrong in tests.errors():
        tensors = [t for t in Sample(wrong.args, wrong.kwargs).tensors if t.layout == torch.strided]
        leaves = [t for t in tensors if t.is_floating_point() and t.is_leaf]
        if not leaves or any(t.requires_grad for t in leaves):
            continue
        with torch.no_grad(), pytest.raises(wrong.error) as without:
            function(*wrong.args, **wrong.kwargs)
        leaves[0].requires_grad_()
        with pytest.raises(wrong.error) as beside:
            function(*wrong.args, **wrong.kwargs)
        if "requires" not in str(beside.value):  # those that have no gradient at all
            assert str(beside.value) == str(without.value)


@pytest.mark.parametrize("requires_gradient", [False, True])
def test_a_sparse_tensor_that_may_require_a_gradient(requires_gradient: bool) -> None:
    sparse = torch.eye(4).to_sparse().requires_grad_(requires_gradient)
    for call in (lambda: pkg.ops.matmul(sparse, torch.eye(4)), lambda: pkg.ops.d_sigmoid(sparse)):
        with pytest.raises(RuntimeError, match=r"is a sparse tensor .*convert it with"):
            call()


def test_a_result_for_which_there_is_no_memory() -> None:
    column, row = torch.ones(1, 1).expand(2**20, 1), torch.ones(1, 1).expand(1, 2**30)
    for function in (pkg.ops.matmul, pkg.ops.mul, torch.ops.pkg.matmul.default):
        with pytest.raises(
            RuntimeError, match=r"no memory for a result of shape \(1048576, 107374"
        ):
            function(column, row)
