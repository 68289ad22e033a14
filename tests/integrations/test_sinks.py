"""Attention with sinks beside its definition: one more column of scores, without a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import normal
from torch import Tensor

from pkg.integrations._sinks import attention_with_sinks
from pkg.testing import Sample
from pkg.testing.tolerance import expect


def plain(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    scores = query @ key.mT * 0.3
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("rows", "columns", "kind"),
    [(5, 9, "none"), (5, 9, "mask"), (12, 12, "causal"), (1, 40, "mask"), (40, 40, "causal")],
)
def test_values_and_gradients(rows: int, columns: int, kind: str, dtype: torch.dtype) -> None:
    mask = None
    if kind == "mask":
        mask = torch.rand(2, 1, rows, columns) < 0.5
        mask[0, :, 0] = False  # the sink alone
    tensors = (
        normal(2, 4, rows, 8),
        normal(2, 2, columns, 8, seed=1),
        normal(2, 2, columns, 12, seed=2),
        normal(4, seed=3),
    )
    weights = normal(2, 4, rows, 12, seed=4)

    def evaluate(function: Any, sample: Sample) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in sample.args]
        with torch.no_grad():
            alone = function(*leaves)
        output = function(*leaves)
        loss = (output * weights.to(output.dtype)).sum()
        return [alone, output.detach(), *torch.autograd.grad(loss, leaves)]

    def ours(*leaves: Tensor) -> Tensor:
        options = {"scale": 0.3, "enable_gqa": True}
        return attention_with_sinks(*leaves, mask, 0.0, kind == "causal", **options)

    sample = Sample(tensors).converted(dtype)
    expected = expect(lambda s: evaluate(lambda *t: plain(*t, mask, kind == "causal"), s), sample)
    names = ("alone", "output", "query", "key", "value", "sinks")
    for name, each, value in zip(names, expected, evaluate(ours, sample), strict=True):
        each.compare(value, name)


def pushed(function: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.func.jvp(function, tensors, tensors)[1]


def pushed_through_a_batch(function: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    batch = tuple(torch.stack((each, 2 * each)) for each in tensors)
    return pushed(torch.func.vmap(function), batch)


def gradient_of_a_batch(function: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    def loss(query: Tensor) -> Tensor:
        return torch.func.vmap(function)(query, *(each[None] for each in tensors[1:])).sum()

    return torch.func.grad(loss)(tensors[0][None])


def pushed_where_compiled(function: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    compiled = torch.compile(pushed, backend="eager", fullgraph=True)
    return compiled(function, tensors)


@pytest.mark.parametrize(
    "differentiate",
    [
        *(pushed, pushed_through_a_batch, gradient_of_a_batch),
        pytest.param(pushed_where_compiled, marks=pytest.mark.tracing),
    ],
)
def test_derivatives_by_torch_func(differentiate: Any) -> None:
    sizes = ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 12), (4,))
    tensors = tuple(normal(*size, seed=seed) for seed, size in enumerate(sizes))
    actual = differentiate(lambda *t: attention_with_sinks(*t, scale=0.3), tensors)
    expected = differentiate(lambda *t: plain(*t, None, False), tensors)
    torch.testing.assert_close(actual, expected)


def test_dropout_takes_no_sink() -> None:
    zeros, ones = torch.zeros(1, 1, 1000, 4), torch.ones(1, 1, 1000, 1)
    sinks = torch.full((1,), 1000.0).log()  # as much as all keys together
    for recording in (False, True):
        output = attention_with_sinks(
            zeros, zeros, ones, sinks.clone().requires_grad_(recording), None, 0.5
        )
        # The mean of 500 ± 16 kept of 1000, each twice 1 / 2000, a thousand times.
        assert abs(float(output.mean()) - 0.5) < 0.005
        assert output.std() > 0.001


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_are_as_exact_in_training(dtype: torch.dtype) -> None:
    query = normal(1, 1, 16, 80).to(dtype)
    value = torch.full((1, 1, 40, 8), 30.0, dtype=dtype)
    sinks = torch.tensor([30.3])
    key = query[:, :, :1].expand(1, 1, 40, 80)
    mask = torch.full((16, 40), 27.0)  # the keys together weigh about as much as the sink
    output = attention_with_sinks(query, key, value, sinks, mask)
    trained = attention_with_sinks(query, key, value, sinks.requires_grad_(), mask)
    assert output.min() > 1
    torch.testing.assert_close(trained, output, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def test_autocast_computes_in_its_dtype_in_training_too() -> None:
    tensors = [normal(1, 2, rows, 8, seed=rows).float() for rows in (5, 9, 9)]
    sinks = torch.tensor([0.3, 77777.0])  # which float16 does not hold
    rounded = attention_with_sinks(*(each.half() for each in tensors), sinks)
    for recording in (False, True):
        with torch.autocast("cpu", torch.float16):
            output = attention_with_sinks(*tensors, sinks.clone().requires_grad_(recording))
        assert output.dtype == torch.float16
        torch.testing.assert_close(output, rounded, rtol=2**-9, atol=0.0)


def test_a_mask_with_one_column_broadcasts_in_training_too() -> None:
    query, mask = normal(2, 2, 5, 8), torch.tensor([True, False])[:, None, None, None]
    output = attention_with_sinks(query, query, query, torch.ones(2).double(), mask)
    sinks = torch.ones(2, requires_grad=True).double()
    torch.testing.assert_close(attention_with_sinks(query, query, query, sinks, mask), output)


def test_sinks_of_another_shape_are_refused() -> None:
    query = torch.zeros(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match=r"of shape \[3\]; they must be \[4\]"):
        attention_with_sinks(query, query, query, torch.zeros(3))


@pytest.mark.parametrize(("sink", "weight"), [(-torch.inf, 1.0), (torch.inf, 0.0), (3e4, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_that_take_none_or_all_of_the_weight(
    sink: float, weight: float, dtype: torch.dtype
) -> None:
    query, key, value = (normal(1, 1, 3, 8, seed=seed).to(dtype) for seed in range(3))
    sinks = torch.tensor([sink], dtype=dtype, requires_grad=True)
    expected = weight * attention_with_sinks(
        *(query, key, value, torch.tensor([-torch.inf], dtype=dtype)),
        *(None, 0.0, False),
        scale=0.1,
        enable_gqa=False,
    )
    leaf = query.clone().requires_grad_()
    output = attention_with_sinks(
        leaf, key, value, sinks, None, 0.0, False, scale=0.1, enable_gqa=False
    )
    torch.testing.assert_close(output.detach(), expected, rtol=2e-3, atol=2e-3)
    gradients = torch.autograd.grad(output.sum(), (leaf, sinks))
    assert all(each.isfinite().all() for each in gradients)
    assert gradients[1] == 0
