"""How exact attention is beside PyTorch's math backend, which holds the whole matrix of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import references
import torch
from samples import normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import pkg

Data = tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]


def tensors(
    rows: int,
    keys: int,
    size: int = 64,
    heads: tuple[int, int] = (2, 2),
    query_scale: float = 1.0,
    key_scale: float = 1.0,
    key_mean: float = 0.0,
    value_mean: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    query = normal(2, heads[0], rows, size) * query_scale
    key = normal(2, heads[1], keys, size, seed=1) * key_scale + key_mean
    return query, key, normal(2, heads[1], keys, size, seed=2) + value_mean


def boolean_mask(rows: int, keys: int, share: float) -> Tensor:
    return (normal(rows, keys, seed=3).abs() < share) | torch.eye(rows, keys, dtype=torch.bool)


def rising(rise: float, keys: int = 600, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that rise, or fall, from key to key.

    The largest of a block of keys is much above, or below, that of all before it; and what the
    gradients of the scores lack of a sum of 0 times a key is much above the gradient of a query.
    """
    query, key, value = tensors(130, keys, **options)
    query[..., 0] = 8
    key[..., 0] = torch.linspace(0, rise, keys)
    return query, key, value


def by_columns(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query, key.mT.contiguous().mT, value


def shuffled(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.randperm(key.shape[-2], generator=torch.Generator().manual_seed(5))
    return query, key[..., order, :], value[..., order, :]


def far_key(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One key a thousand times as large as the others."""
    key = key.clone()
    key[..., 100, :] *= 1000
    return query, key, value


DATA: dict[str, Callable[[], Data]] = {
    "random": lambda: (tensors(130, 260), None, {}),
    "causal": lambda: (tensors(200, 200), None, {"is_causal": True}),
    "large scores": lambda: (tensors(130, 260, query_scale=6, key_scale=3), None, {}),
    "one key has all the probability": lambda: (
        tensors(130, 260, query_scale=30, key_scale=10),
        None,
        {},
    ),
    "values with a mean": lambda: (tensors(130, 260, value_mean=2), None, {}),
    "long": lambda: (tensors(50, 4096), None, {}),
    "long, large scores": lambda: (tensors(50, 4096, query_scale=4, key_scale=2), None, {}),
    "long, values with a mean": lambda: (tensors(50, 4096, value_mean=2), None, {}),
    "few rows": lambda: (tensors(2, 4096), None, {}),
    # Of many heads, since most of each row's error is that of the one or two keys that count.
    "few rows, large scores": lambda: (
        tensors(2, 4096, heads=(24, 24), query_scale=4, key_scale=2),
        None,
        {},
    ),
    "boolean mask": lambda: (tensors(130, 260), boolean_mask(130, 260, 1.0), {}),
    "sparse mask": lambda: (tensors(130, 260), boolean_mask(130, 260, 0.05), {}),
    "float mask": lambda: (tensors(130, 260), normal(2, 130, 260, seed=3) * 2, {}),
    "broadcast mask": lambda: (tensors(130, 260), normal(260, seed=3) * 2, {}),
    "grouped": lambda: (tensors(130, 260, heads=(4, 2)), None, {"enable_gqa": True}),
    "head of 8": lambda: (tensors(130, 260, size=8), None, {}),
    "head of 128": lambda: (tensors(130, 260, size=128), None, {}),
    "head of 512": lambda: (tensors(60, 160, size=512), None, {}),
    "short": lambda: (tensors(16, 16), None, {}),
    "scores rise by 20": lambda: (rising(20), None, {}),
    "scores rise by 300": lambda: (rising(300), None, {}),
    "scores fall": lambda: (rising(-60), None, {}),
    "scores rise, causal": lambda: (rising(20), None, {"is_causal": True}),
    "scores rise much, causal": lambda: (rising(300), None, {"is_causal": True}),
    "scores fall, causal": lambda: (rising(-60), None, {"is_causal": True}),
    "scores rise, shuffled": lambda: (shuffled(*rising(300)), None, {}),
    "scores rise, one head": lambda: (rising(300, 1000, heads=(1, 1)), None, {}),
    "one key of many, values with a mean": lambda: (
        tensors(130, 600, query_scale=30, key_scale=10, value_mean=20),
        None,
        {},
    ),
    "keys and values with a mean": lambda: (
        tensors(130, 333, size=43, key_mean=9, value_mean=9),
        None,
        {},
    ),
    "keys with a mean, values with another": lambda: (
        tensors(130, 333, size=128, key_mean=2, value_mean=-1),
        None,
        {},
    ),
    "causal, keys with a mean": lambda: (
        tensors(200, 200, key_mean=4, value_mean=4),
        None,
        {"is_causal": True},
    ),
    "keys with a mean and one far away": lambda: (
        far_key(*tensors(130, 333, key_mean=1)),
        None,
        {},
    ),
    "keys by columns, with a mean": lambda: (
        by_columns(*tensors(130, 260, key_mean=9)),
        None,
        {},
    ),
}


def results(attention: Callable[..., Tensor], data: Data) -> dict[str, Tensor]:
    """The output and all gradients, in double precision."""
    inputs, mask, options = data
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    names = ["query", "key", "value"]
    wanted = list(leaves)
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().requires_grad_()
        wanted.append(mask)
        names.append("mask")
    output = attention(*leaves, attn_mask=mask, **options)
    grad = normal(*output.shape, seed=4).to(inputs[0].dtype).to(output)
    gradients = torch.autograd.grad(output, wanted, grad)
    found = {f"gradient of {name}": each for name, each in zip(names, gradients, strict=True)}
    return {name: each.detach().double() for name, each in {"output": output, **found}.items()}


def converted(data: Data, dtype: torch.dtype) -> Data:
    inputs, mask, options = data
    query, key, value = (tensor.to(dtype) for tensor in inputs)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return (query, key, value), mask, options


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Of operands that PyTorch's fused kernel takes: dense, with heads of a multiple of 8."""
    dense = (pad(tensor, (0, -tensor.shape[-1] % 8)).contiguous() for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5
    output = scaled_dot_product_attention(*dense, **options, scale=scale)
    return output[..., : value.shape[-1]]


def check_errors(attention: Callable[..., Tensor], data: Data) -> None:
    """By the norm of the errors of all elements: the largest alone is a matter of luck.

    On CUDA the math backend multiplies in float32 what has half precision, which no kernel on
    tensor cores does: there PyTorch's own fused kernel is the measure, where it takes the call.
    """
    ours = results(attention, data)
    wide = converted(data, torch.float64)
    fused = [SDPBackend.EFFICIENT_ATTENTION] if data[0][0].is_cuda else []
    with sdpa_kernel([*fused, SDPBackend.MATH], set_priority=True):
        plain = results(fused_attention if fused else scaled_dot_product_attention, data)
    with sdpa_kernel(SDPBackend.MATH):
        exact = results(scaled_dot_product_attention, wide)
    for result, expected in exact.items():
        error = (ours[result] - expected).norm()
        limit = 2 * (plain[result] - expected).norm()
        assert error <= limit, f"{result}: {error:.3g}, more than {limit:.3g}"


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_math_backend(
    device: torch.device, dtype: torch.dtype, name: str
) -> None:
    inputs, mask, options = converted(DATA[name](), dtype)
    query, key, value = (tensor.to(device) for tensor in inputs)
    data = (query, key, value), mask if mask is None else mask.to(device), options
    check_errors(pkg.ops.scaled_dot_product_attention, data)


def capped_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    softcap: float,
) -> Tensor:
    """Capped attention as PyTorch's math backend would have it, its gradients by autograd."""
    scores = references.attention_scores(query, key, attn_mask, is_causal, softcap=softcap)
    return torch.softmax(scores, -1) @ value


@pytest.mark.parametrize(
    "name",
    [
        *("random", "causal", "large scores", "values with a mean", "long", "few rows"),
        *("sparse mask", "float mask", "head of 128", "scores rise by 20"),
        *("keys and values with a mean", "keys with a mean, values with another"),
        "causal, keys with a mean",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_of_capped_scores(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """At most twice that of the definition, which has no operator of PyTorch's."""
    inputs, mask, options = converted(DATA[name](), dtype)
    query, key, value = (tensor.to(device) for tensor in inputs)
    data = (
        (query, key, value),
        None if mask is None else mask.to(device),
        {**options, "softcap": 20.0},
    )
    ours = results(pkg.ops.scaled_dot_product_attention, data)
    plain = results(capped_by_definition, data)
    exact = results(capped_by_definition, converted(data, torch.float64))
    for result, expected in exact.items():
        error, limit = ((each[result] - expected).norm() for each in (ours, plain))
        assert error <= 2 * limit, f"{result}: {error:.3g}, more than twice {limit:.3g}"


@pytest.mark.parametrize("rise", [20, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_of_packed_sequences_where_scores_rise(
    device: torch.device, dtype: torch.dtype, rise: float
) -> None:
    """Two sequences, which are the batch of the math backend."""

    def packed(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None) -> Tensor:
        starts, ends = (
            torch.arange(3, dtype=torch.int32, device=device) * tensor.shape[-2]
            for tensor in (query, key)
        )
        tokens = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        longest = query.shape[-2], key.shape[-2]
        output = pkg.ops.scaled_dot_product_attention_varlen(*tokens, starts, ends, *longest)
        return output.unflatten(0, (2, -1)).transpose(1, 2)

    inputs, mask, options = converted((rising(rise), None, {}), dtype)
    query, key, value = (tensor.to(device) for tensor in inputs)
    check_errors(packed, ((query, key, value), mask, options))


def ratio_of_probabilities(scores: Tensor, keys: int) -> Tensor:
    """The probability of a key with each score, divided by that of a key whose score is 0.

    Both probabilities have been divided by the same sum, with one rounding each, of which that of
    the larger, 1, is none: their ratio is exp(score), with its error and half a unit more.
    """
    batch = scores.numel() // 8
    query = scores.reshape(batch, 8, 1)
    key, value = torch.zeros(1, keys, 1), torch.zeros(1, keys, 2)
    key[:, 1] = value[:, 0, 0] = value[:, 1, 1] = 1
    mask = torch.arange(keys) < 2
    output = pkg.ops.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
    return (output[..., 1].double() / output[..., 0].double()).flatten()


def units(probabilities: Tensor, exact: Tensor) -> Tensor:
    """The errors in units of the last place of float32.

    What is less than 2^-99 of the largest probability may be 0; or, if it is not, as far off as the
    last place of denormal numbers.
    """
    exponent = torch.frexp(exact)[1] - 1
    errors = (probabilities - exact).abs() / torch.exp2((exponent - 23).clamp(min=-149).double())
    return errors.masked_fill((probabilities == 0) & (exact < 2**-99), 0)


# Every exponent of the result, those of denormal numbers too, and then zero.
SCORES = torch.cat([-torch.linspace(0, 105, 1 << 16), -torch.logspace(-8, 2, 1 << 12)])


@pytest.mark.parametrize("keys", [2, 1000])
def test_exponentials_of_the_forward_pass(keys: int) -> None:
    exact = torch.exp(SCORES.double())
    assert units(ratio_of_probabilities(SCORES, keys), exact).max() <= 2.5


def test_exponentials_of_the_backward_pass() -> None:
    # Below exp(-17) the sum of the probabilities is 1, so that the gradient of a value is its own.
    scores = SCORES[SCORES < -17]
    query, key = scores.reshape(-1, 1, 1), torch.tensor([[[0.0], [1.0]]])
    value = torch.zeros(len(scores), 2, 1, requires_grad=True)
    output = pkg.ops.scaled_dot_product_attention(query, key, value, scale=1.0)
    (probabilities,) = torch.autograd.grad(output.sum(), value)
    exact = torch.exp(scores.double())
    assert units(probabilities[:, 1, 0].double(), exact).max() <= 2
