"""The operators as plain functions of ``pkg._C``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from operator_collection import INFERENCE_ONLY, operator_classes, public_operators
from operator_tests import EVERY
from resident_memory import least_growth, needs_resident_bytes
from samples import normal
from torch import Tensor

import pkg
from pkg.testing import Sample, same_bits

OPERATORS = public_operators()
# That of int4_linear is not of its scales.
WITH_GRADIENTS = [name for name in OPERATORS if name not in INFERENCE_ONLY | {"int4_linear"}]


def samples_of(operator: str, device: torch.device) -> list[Sample]:
    samples = operator_classes()[operator]().samples()[::EVERY]
    samples = [s.converted(torch.float32) for s in samples]
    return [s.map_tensors(lambda t: t.to(device)) for s in samples if not s.random]


def results_of(function: Any, sample: Sample) -> list[Tensor]:
    """What a call returns and what it writes to."""
    returned = function(*sample.args, **sample.kwargs)
    if isinstance(returned, tuple):
        return list(returned)
    return [returned] if isinstance(returned, Tensor) else list(sample.kwargs.values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_gives_the_bits_of_the_dispatched_operator(operator: str, device: torch.device) -> None:
    plain, dispatched = getattr(pkg._C, operator), getattr(torch.ops.pkg, operator).default
    for sample in samples_of(operator, device):
        actual = results_of(plain, sample.copy())
        expected = results_of(dispatched, sample.copy())
        assert len(actual) == len(expected) > 0
        for result, wanted in zip(actual, expected, strict=True):
            assert same_bits(result, wanted), str(sample)
            assert result.stride() == wanted.stride(), str(sample)
            assert result.device == wanted.device, str(sample)


@pytest.mark.parametrize("operator", OPERATORS)
def test_takes_every_argument_by_name(operator: str, device: torch.device) -> None:
    schema = getattr(torch.ops.pkg, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    sample = samples_of(operator, device)[0]
    by_name = Sample(kwargs=dict(zip(names, sample.args, strict=False)) | dict(sample.kwargs))
    expected = results_of(getattr(pkg._C, operator), sample.copy())[-1]
    for function in (getattr(pkg._C, operator), getattr(pkg.ops, operator)):
        assert same_bits(results_of(function, by_name.copy())[-1], expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_errors_have_the_words_of_the_dispatched_operator(
    operator: str, device: torch.device
) -> None:
    plain, dispatched = getattr(pkg._C, operator), getattr(torch.ops.pkg, operator).default
    errors = [error.to(device) for error in operator_classes()[operator]().errors()]
    assert errors
    for error in errors:
        with pytest.raises(error.error) as expected:
            dispatched(*error.args, **error.kwargs)
        with pytest.raises(RuntimeError) as actual:
            plain(*error.args, **error.kwargs)
        if expected.type is RuntimeError:
            assert str(actual.value) == str(expected.value), str(error)
            assert "Exception raised from" not in str(actual.value), str(error)
            assert ".cpp" not in str(actual.value), str(error)
        else:  # PyTorch's own refusal, with a list of every kernel's place; ours is one sentence
            assert "must be a strided (dense) one" in str(actual.value), str(error)


@pytest.mark.parametrize("wrong", [None, 1.5, "text", [1.0], np.ones(3), torch.float32, object()])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_no_tensor_is_a_type_error(operator: str, wrong: Any) -> None:
    sample = samples_of(operator, torch.device("cpu"))[0]
    plain = getattr(pkg._C, operator)
    schema = getattr(torch.ops.pkg, operator).default._schema
    for position, argument in enumerate(sample.args):
        takes_none = str(schema.arguments[position].type).startswith("Optional")
        if isinstance(argument, Tensor) and not (wrong is None and takes_none):
            args = list(sample.args)
            args[position] = wrong
            with pytest.raises(TypeError, match=r"; it must be a torch\.Tensor"):
                plain(*args, **sample.kwargs)


@pytest.mark.parametrize("operator", OPERATORS)
def test_missing_and_unknown_arguments_are_type_errors(operator: str) -> None:
    plain = getattr(pkg._C, operator)
    sample = samples_of(operator, torch.device("cpu"))[0]
    first_name = getattr(torch.ops.pkg, operator).default._schema.arguments[0].name
    with pytest.raises(TypeError, match=rf"{operator}\(\) missing required argument"):
        plain()
    with pytest.raises(TypeError, match="unexpected keyword argument 'speling'"):
        plain(*sample.args, **sample.kwargs, speling=1)
    with pytest.raises(TypeError, match="multiple values for argument"):
        plain(*sample.args, **sample.kwargs | {first_name: sample.args[0]})
    with pytest.raises(TypeError, match="takes at most"):
        plain(*sample.args, *[None] * 20, **sample.kwargs)


def test_an_out_dtype_that_is_none_is_a_type_error() -> None:
    a = torch.ones(2, 2)
    for wrong in (1, "float32", a):
        with pytest.raises(TypeError, match=r"out_dtype is .*; it must be a torch\.dtype"):
            pkg._C.matmul(a, a, out_dtype=wrong)
    with pytest.raises(RuntimeError, match="out_dtype"):
        pkg._C.matmul(a, a, out_dtype=torch.complex64)


@pytest.mark.parametrize("operator", WITH_GRADIENTS)
def test_autograd_flows_through(operator: str, device: torch.device) -> None:
    gradients = []
    for function in (getattr(pkg._C, operator), getattr(torch.ops.pkg, operator).default):
        sample = samples_of(operator, device)[0].copy()
        leaves = [tensor for tensor in sample.tensors if tensor.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        result = function(*sample.args, **sample.kwargs)
        total = sum(each.sum() for each in (result if isinstance(result, tuple) else [result]))
        assert total.requires_grad
        gradients.append(torch.autograd.grad(total, leaves))
    for plain, dispatched in zip(*gradients, strict=True):
        assert same_bits(plain, dispatched)


def test_autocast_and_vmap_apply(device: torch.device) -> None:
    a = normal(3, 4, 5).float().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert pkg._C.matmul(a, a.mT).dtype == torch.bfloat16
    mapped = torch.func.vmap(pkg._C.mul)(a, a)
    assert torch.equal(mapped, a * a)


@needs_resident_bytes
@pytest.mark.long
def test_a_hundred_thousand_calls_do_not_grow_the_process() -> None:
    a, out = torch.ones(4), torch.ones(4)
    matrix = torch.ones(2, 2)

    def call(count: int) -> None:
        for _ in range(count):
            pkg._C.mul(a, a)
            pkg._C.matmul(matrix, matrix, out_dtype=torch.float32)
            pkg._C.add_out(a, a, out=out)
            pkg._C.linear(matrix, matrix, None, "gelu_tanh")
            try:
                pkg._C.mul(a, matrix.view(4, 1)[:3])
                pkg._C.matmul(a, matrix)
            except RuntimeError:
                pass

    call(2_000)
    # A single lost tensor handle would cost hundreds of bytes a call.
    assert least_growth(lambda: call(10_000)) < 10_000 * 40
