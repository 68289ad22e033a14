"""accelerate() gives multi-head attention over nested tensors this package's packed attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from test_accelerate_multihead import (
    FLOATING,
    HEADS,
    LONG,
    WIDTH,
    assert_same_error,
    by_definition,
    tensors,
)
from torch import Tensor, nn

import pkg
from pkg import _accelerate_multihead_nested
from pkg.testing import Sample, expect

LENGTHS = (LONG, 1, 0, 77)
operator = torch._native_multi_head_attention


@pytest.fixture(autouse=True)
def no_warning_of_a_prototype() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors", category=UserWarning)
        yield


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.strided)


def operands(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """All sequences' tokens, one behind the other, and the projections' weights and biases."""
    _, *parameters = tensors(dtype)
    return [torch.randn(sum(lengths), WIDTH, dtype=torch.float64).to(dtype), *parameters]


def attend(sample: Sample, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    x, *parameters = sample.args
    whole = nested(list(x.split(lengths)))
    arguments = (WIDTH, HEADS, *parameters, None, False, True, None)
    return operator(whole, whole, whole, *arguments)[0]


def by_sequence(sample: Sample) -> list[Tensor]:
    """Each sequence by itself."""
    x, *parameters = sample.args
    each = [
        by_definition(Sample((part[None], *parameters), {}))[0][0]
        for part in x.split(LENGTHS)
        if len(part)
    ]
    return [torch.cat(each)]


def taken(block: pkg.accelerate.Acceleration) -> int:
    """Calls of packed attention that ran here."""
    counts = block.report().counts
    return sum(each.taken for each in counts if each.operator == "_flash_attention_forward")


@pytest.mark.parametrize("dtype", FLOATING)
def test_results(dtype: torch.dtype) -> None:
    sample = Sample(tuple(operands(dtype)), {})
    theirs = attend(sample)
    with pkg.accelerate(report=True) as block:
        ours = attend(sample)
        assert taken(block) == 1
    assert ours.is_nested
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours._nested_tensor_size(), theirs._nested_tensor_size())
    assert ours.is_contiguous()
    assert theirs.is_contiguous()
    (wanted,) = expect(by_sequence, sample)
    wanted.compare(ours.values().view(-1, WIDTH), "attention")


@pytest.mark.parametrize("lengths", [(1,), (_accelerate_multihead_nested.LEAST_TOKENS - 6, 0, 5)])
def test_few_tokens_are_left_alone(lengths: tuple[int, ...]) -> None:
    sample = Sample(tuple(operands(torch.float32, lengths)), {})
    with pkg.accelerate(report=True) as block:
        attend(sample, lengths)
        assert taken(block) == 0


def test_off_again_it_is_pytorch_s() -> None:
    sample = Sample(tuple(operands(torch.float64)), {})
    with pkg.accelerate(report=True) as block:
        attend(sample)
        block.report()
        with pkg.accelerate(False):
            attend(sample)
        assert taken(block) == 0


def test_what_attention_here_does_not_give_is_pytorch_s() -> None:
    """Weights, and sequences that do not lie one behind the other."""
    x, *parameters = operands(torch.float64)
    parts = list(x.split(LENGTHS))
    whole = nested(parts)
    sizes = whole._nested_tensor_size()
    apart = torch._nested_view_from_buffer(
        whole.values(),
        sizes[[0, 3]],
        whole._nested_tensor_strides()[[0, 3]],
        torch.tensor([0, WIDTH]),
    )
    calls = {
        "weights": lambda: operator(whole, whole, whole, WIDTH, HEADS, *parameters, None, True)[0],
        "places": lambda: operator(apart, apart, apart, WIDTH, HEADS, *parameters, None, False)[0],
    }
    for name, call in calls.items():
        outcomes: list[Tensor | str] = []
        for is_on in (False, True):
            with pkg.accelerate(is_on, report=True) as block:
                try:
                    outcomes.append(call().values())
                except RuntimeError as error:
                    outcomes.append(str(error).splitlines()[0])
                assert taken(block) == 0, name
        theirs, ours = outcomes
        assert type(ours) is type(theirs)
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
        else:
            assert ours == theirs


def test_errors_are_pytorch_s() -> None:
    x, weight, *rest = operands(torch.float32)
    whole = nested(list(x.split(LENGTHS)))
    mask = torch.zeros(len(LENGTHS), LONG, dtype=torch.bool)
    for arguments in (
        (whole, WIDTH, 5, weight, *rest, None),
        (whole, WIDTH, HEADS, weight[:-1], *rest, None),
        (whole, WIDTH, HEADS, weight.double(), *rest, None),
        (whole, WIDTH, HEADS, weight, *rest, mask),
    ):
        first, *others = arguments
        assert_same_error(lambda first=first, rest=others: operator(*[first] * 3, *rest, False))


def test_an_encoder_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.randn(3, LONG, WIDTH, dtype=torch.float64)
    hidden = torch.arange(LONG) >= torch.tensor([[LONG], [40], [99]])
    with torch.inference_mode():
        theirs = encoder(x, src_key_padding_mask=hidden)
        with pkg.accelerate(report=True) as block:
            ours = encoder(x, src_key_padding_mask=hidden)
            assert taken(block) == 2
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_default_device_is_not_asked() -> None:
    sample = Sample(tuple(operands(torch.float64)), {})
    x, *parameters = sample.args
    whole = nested(list(x.split(LENGTHS)))
    with pkg.accelerate(report=True) as block, torch.device("meta"):
        ours = operator(whole, whole, whole, WIDTH, HEADS, *parameters, None, False, True, None)[0]
        assert taken(block) == 1
    assert ours.device.type == "cpu"
