"""A number is no bool and a bool no number, by ``pkg.ops`` and by ``pkg._C``.

``torch.ops`` is not asked: PyTorch's own parser converts either to the other, for its operators as
for these, before an operator sees its arguments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from samples import normal
from torch import Tensor

import pkg

WAYS = pytest.mark.parametrize("way", [pkg.ops, pkg._C], ids=["pkg.ops", "pkg._C"])
BOOLS: list[Any] = [True, False]
NO_BOOLS: list[Any] = [0.125, 0.0, 1.0, 1, 0]
DENSE: dict[str, list[Any]] = {
    "dropout_p": BOOLS,
    "is_causal": NO_BOOLS,
    "scale": BOOLS,
    "enable_gqa": NO_BOOLS,
}
PACKED: dict[str, list[Any]] = {
    "max_seqlen_q": BOOLS,
    "max_seqlen_k": BOOLS,
    "dropout_p": BOOLS,
    "softmax_scale": BOOLS,
    "causal": NO_BOOLS,
}


def refused(options: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value}")
        for name, values in options.items()
        for value in values
    ]


def dense() -> dict[str, Tensor]:
    return {name: normal(1, 2, 3, 4, seed=i) for i, name in enumerate(("query", "key", "value"))}


def packed() -> dict[str, Any]:
    """Two sequences of one token, so that True would do as the longest."""
    starts = torch.tensor([0, 1, 2])
    tokens = {name: normal(2, 2, 4, seed=i) for i, name in enumerate(("query", "key", "value"))}
    offsets = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return {**tokens, **offsets, "max_seqlen_q": 1, "max_seqlen_k": 1}


@WAYS
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize(("name", "value"), refused(DENSE))
def test_attention_refuses(way: ModuleType, name: str, value: Any, recording: bool) -> None:
    arguments: dict[str, Any] = dense()
    arguments["query"].requires_grad_(recording)
    way.scaled_dot_product_attention(**arguments)
    with pytest.raises(TypeError, match=name):
        way.scaled_dot_product_attention(**arguments, **{name: value})


@WAYS
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize(("name", "value"), refused(PACKED))
def test_packed_attention_refuses(way: ModuleType, name: str, value: Any, recording: bool) -> None:
    arguments = packed()
    arguments["query"].requires_grad_(recording)
    way.scaled_dot_product_attention_varlen(**arguments)
    with pytest.raises(TypeError, match=name):
        way.scaled_dot_product_attention_varlen(**(arguments | {name: value}))


@WAYS
def test_attention_refuses_by_position(way: ModuleType) -> None:
    inputs = tuple(dense().values())
    with pytest.raises(TypeError, match="is_causal"):
        way.scaled_dot_product_attention(*inputs, None, 0.0, 0.125)
    with pytest.raises(TypeError, match="dropout_p"):
        way.scaled_dot_product_attention(*inputs, None, True)


@WAYS
def test_packed_attention_refuses_its_options_in_another_order(way: ModuleType) -> None:
    """Causal before the scale: neither would be what the caller meant."""
    with pytest.raises(TypeError, match="softmax_scale"):
        way.scaled_dot_product_attention_varlen(*packed().values(), 0.0, True, 0.125)
    with pytest.raises(TypeError, match="causal"):
        way.scaled_dot_product_attention_varlen(*packed().values(), 0.0, None, 0.125)
    with pytest.raises(TypeError, match="dropout_p"):
        way.scaled_dot_product_attention_varlen(*packed().values(), True)


@WAYS
def test_whole_numbers_are_numbers(way: ModuleType) -> None:
    """As everywhere in Python, and in PyTorch."""
    inputs, tokens = dense(), packed()
    attend, attend_packed = (
        way.scaled_dot_product_attention,
        way.scaled_dot_product_attention_varlen,
    )
    assert torch.equal(
        attend(**inputs, dropout_p=0, scale=1), attend(**inputs, dropout_p=0.0, scale=1.0)
    )
    assert torch.equal(
        attend_packed(**tokens, dropout_p=0, softmax_scale=1),
        attend_packed(**tokens, dropout_p=0.0, softmax_scale=1.0),
    )
