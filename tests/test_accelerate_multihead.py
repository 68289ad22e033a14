"""accelerate() gives the inference path of multi-head attention this package's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import accelerate_tables
import pytest
import torch
from torch import Tensor, nn

import pkg
from pkg import _accelerate_multihead
from pkg.testing import Sample, expect

WIDTH, HEADS = 64, 4
LONG = 130
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
operator = torch._native_multi_head_attention


@pytest.fixture(autouse=True)
def some_table() -> Iterator[None]:
    """One by which everything is taken that these kernels can take."""
    with accelerate_tables.in_use(float("inf")):
        yield


def tensors(dtype: torch.dtype, tokens: int = LONG) -> list[Tensor]:
    """Tokens, and weights and biases of the projections."""
    shapes = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    weights = [torch.randn(shape, dtype=torch.float64) / WIDTH**0.5 for shape in shapes]
    made = [torch.randn(2, tokens, WIDTH, dtype=torch.float64), *weights]
    return [each.to(dtype) for each in made]


def attend(sample: Sample, mask: Tensor | None = None, mask_type: int | None = None) -> Tensor:
    x, *parameters = sample.args
    return operator(x, x, x, WIDTH, HEADS, *parameters, mask, False, True, mask_type)[0]


def by_definition(sample: Sample, hidden: Tensor | None = None) -> list[Tensor]:
    """Each step by itself, as PyTorch's kernel takes them."""
    x, weight, bias, out_weight, out_bias = sample.args
    projected = (x @ weight.t() + bias).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    query, key, value = projected.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    attended = torch.softmax(scores, -1) @ value
    return [attended.transpose(1, 2).reshape(x.shape) @ out_weight.t() + out_bias]


def assert_same_error(call: Callable[[], object]) -> None:
    """What PyTorch refuses is refused under accelerate() too, in its words."""
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        call()
    with pkg.accelerate(), pytest.raises(type(theirs.value)) as ours:
        call()
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def taken(block: pkg.accelerate.Acceleration) -> int:
    """Calls of attention that ran here."""
    return sum(each.taken for each in block.report().counts if each.operator == _FORWARD)


@pytest.mark.parametrize("dtype", FLOATING)
def test_results(dtype: torch.dtype) -> None:
    sample = Sample(tuple(tensors(dtype)), {})
    theirs = attend(sample)
    with pkg.accelerate(report=True) as block:
        ours = attend(sample)
        assert taken(block) == 1
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride()
    (wanted,) = expect(by_definition, sample)
    wanted.compare(ours, "attention")


def causal() -> Tensor:
    return torch.ones(LONG, LONG, dtype=torch.bool).triu(1)


def padding() -> Tensor:
    """The second sequence is shorter."""
    hidden = torch.zeros(2, LONG, dtype=torch.bool)
    hidden[1, LONG - 37 :] = True
    return hidden


def masks() -> dict[str, tuple[Tensor, int, Tensor]]:
    """A mask, its type, and what it hides of (batch, heads, queries, keys)."""
    of_all = (2, HEADS, LONG, LONG)
    window = causal() | causal().mT.roll(5, 0).tril(-6)
    of_heads = torch.rand(of_all, generator=torch.Generator().manual_seed(0)) < 0.3
    of_heads[..., 0] = False
    both = causal() | padding()[:, None, None]
    return {
        "causal": (causal(), 0, causal()),
        "window": (window, 0, window),
        "padding": (padding(), 1, padding()[:, None, None]),
        "both": (both.expand(of_all).contiguous(), 2, both),
        "expanded": (causal().expand(of_all), 2, causal()),
        "of heads": (of_heads, 2, of_heads),
    }


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("in_numbers", [False, True])
def test_masks(dtype: torch.dtype, name: str, in_numbers: bool) -> None:
    """Those of nn.TransformerEncoder are numbers, of which what is not zero hides."""
    mask, mask_type, hidden = masks()[name]
    if in_numbers:
        numbers = torch.zeros((), dtype=dtype).expand(mask.shape).masked_fill(mask, -torch.inf)
        mask = numbers[:1, :1].expand(mask.shape) if 0 in mask.stride() else numbers
    sample = Sample(tuple(tensors(dtype)), {})
    with pkg.accelerate(report=True) as block:
        ours = attend(sample, mask, mask_type)
        assert taken(block) == 1
    (wanted,) = expect(lambda sample: by_definition(sample, hidden), sample)
    wanted.compare(ours, "attention")


def test_a_query_that_sees_nothing_is_left_to_pytorch() -> None:
    """Which makes NaN of it, where fused attention makes zeros."""
    sample = Sample(tuple(tensors(torch.float64)), {})
    blind = causal()
    blind[7] = True
    theirs = attend(sample, blind, 0)
    with pkg.accelerate(report=True) as block:
        ours = attend(sample, blind, 0)
        assert taken(block) == 0
    assert ours[:, 7].isnan().all()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    ("mask", "mask_type"), [(causal(), None), (causal(), 1), (padding(), 0), (causal()[None], 2)]
)
def test_masks_are_refused_in_pytorch_s_words(mask: Tensor, mask_type: int | None) -> None:
    sample = Sample(tuple(tensors(torch.float64)), {})
    with pytest.raises(RuntimeError) as theirs:
        attend(sample, mask, mask_type)
    with pkg.accelerate(), pytest.raises(RuntimeError) as ours:
        attend(sample, mask, mask_type)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize("tokens", [1, _accelerate_multihead.LEAST_TOKENS - 1])
def test_short_sequences_are_left_alone(tokens: int) -> None:
    sample = Sample(tuple(tensors(torch.float32, tokens)), {})
    with pkg.accelerate(report=True) as block:
        attend(sample)
        assert taken(block) == 0


def test_a_table_that_says_no_leaves_all_to_pytorch() -> None:
    sample = Sample(tuple(tensors(torch.bfloat16)), {})
    theirs = attend(sample)
    with accelerate_tables.in_use(0.0), pkg.accelerate(report=True) as block:
        ours = attend(sample)
        assert taken(block) == 0
    assert torch.equal(ours, theirs)


def test_what_attention_here_does_not_give_is_pytorch_s() -> None:
    """Weights, other keys than queries."""
    x, *parameters = tensors(torch.float64)
    other = torch.randn_like(x)
    calls = {
        "weights": lambda: operator(x, x, x, WIDTH, HEADS, *parameters, None, True),
        "keys": lambda: operator(x, other, other, WIDTH, HEADS, *parameters, None, False),
    }
    for name, call in calls.items():
        theirs = call()
        with pkg.accelerate(report=True) as block:
            ours = call()
            assert taken(block) == 0, name
        for wanted, actual in zip(theirs, ours, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-13)


def test_errors_are_pytorch_s() -> None:
    x, weight, *rest = tensors(torch.float32)
    for bad in (
        (x, WIDTH, 5, weight, *rest),
        (x, WIDTH, HEADS, weight[:-1], *rest),
        (x[0], WIDTH, HEADS, weight, *rest),
        (x.double(), WIDTH, HEADS, weight, *rest),
    ):
        first, *arguments = bad

        assert_same_error(
            lambda first=first, rest=arguments: operator(*[first] * 3, *rest, None, False)
        )


def test_modules() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    x = torch.randn(2, LONG, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        theirs = encoder(x), attention(x, x, x, need_weights=False)[0]
        with pkg.accelerate(report=True) as block:
            ours = encoder(x), attention(x, x, x, need_weights=False)[0]
            assert taken(block) == 3
    for wanted, actual in zip(theirs, ours, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool")
def test_modules_with_masks() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, LONG, WIDTH, dtype=torch.float64)
    for masks in (
        {"mask": causal()},
        {"src_key_padding_mask": padding()},
        {"mask": causal(), "src_key_padding_mask": padding()},
    ):
        with torch.inference_mode():
            theirs = encoder(x, **masks)
            with pkg.accelerate(report=True) as block:
                ours = encoder(x, **masks)
                assert taken(block) == 2
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
