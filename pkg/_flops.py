"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators.

As PyTorch's own formulas do, these count the multiplications and additions of products, two for
each pair of elements, without biases, activations and softmax; and whole matrices of scores,
whatever masks, causality and windows leave out. The products of a backward pass that are operators
of their own, ``matmul`` for ``linear``, count themselves.

That module is not imported for it, which may take Triton's import: where it is not there yet, the
formulas are registered as soon as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_COUNTER = "torch.utils.flop_counter"
# Elements of a side of the tensor-core tiled layout's tiles: output features.
_ROW_TILE = 8

_Shape = Sequence[int]


def register_when_imported() -> None:
    """Registers the formulas: now, or when ``torch.utils.flop_counter`` is imported."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _register(counter)
    else:
        _forget_finders()
        sys.meta_path.insert(0, _Finder())


def _forget_finders() -> None:
    """Those of copies of this package that were imported before."""
    name = _Finder.__qualname__
    for finder in list(sys.meta_path):
        if type(finder).__module__ == __name__ and type(finder).__qualname__ == name:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the one module as it is found without this, and registers the formulas behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Another loader, and then the formulas."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What looks for the module's source asks its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)


def _register(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        _register_formula(counter, name, formula, get_raw=False)
    for name, formula in _RAW_FORMULAS.items():
        _register_formula(counter, name, formula, get_raw=True)


def _register_formula(
    counter: ModuleType, name: str, formula: Callable[..., int], *, get_raw: bool
) -> None:
    target = getattr(torch.ops.pkg, name)
    # That of a copy of this package that was imported before.
    counter.flop_registry.pop(target, None)
    counter.register_flop_formula(target, get_raw=get_raw)(formula)


def _matmul(a: _Shape, b: _Shape, *_: Any, out_shape: _Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


def _linear(input: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * (weight[0] if len(weight) == 2 else 1)


def _packed_linear(input: _Shape, _: _Shape, out_features: int, *__: Any, **___: Any) -> int:
    return 2 * prod(input) * out_features


def _int4_linear(input: _Shape, packed_w: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * packed_w[0] * _ROW_TILE


def _rowwise_scaled_linear(input: _Shape, _: _Shape, weight: _Shape, *__: Any, **___: Any) -> int:
    # Each byte of the weight holds two values.
    return 2 * prod(input[:-1]) * prod(weight) * 2


def _attention_forward(
    query: _Shape, key: _Shape, value: _Shape, *_: Any, out_shape: Sequence[_Shape], **__: Any
) -> int:
    lead = prod(out_shape[0][:-2])
    return _of_scores(lead * query[-2] * key[-2], query[-1], value[-1], backward=False)


def _attention_backward(
    grad_output: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any
) -> int:
    lead = prod(grad_output[:-2])
    return _of_scores(lead * query[-2] * key[-2], query[-1], value[-1], backward=True)


def _of_scores(scores: int, size: int, value_size: int, *, backward: bool) -> int:
    """The products of as many scores: two, or, scores computed anew, five."""
    products = 3 * size + 2 * value_size if backward else size + value_size
    return 2 * scores * products


def _lltm(input: _Shape, weights: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input[:-1]) * prod(weights)


def _lltm_backward(
    grad_hidden: _Shape | None,
    grad_cells: _Shape | None,
    grad_gates: _Shape | None,
    gates: _Shape,
    hidden: _Shape,
    cells: _Shape,
    input: _Shape,
    weights: _Shape,
    old_h: _Shape,
    needs_input: bool,
    needs_weights: bool,
    needs_old_h: bool,
    **_: Any,
) -> int:
    """The gates' gradients times the weights, for each step's inputs, and times these inputs."""
    # The state before the first step has a gradient where one is asked for, the others always.
    batch, steps = old_h[0], prod(input[:-2])
    states = steps if needs_old_h else max(steps - 1, 0)
    columns = steps * input[-1] * needs_input + states * old_h[-1]
    return 2 * batch * weights[0] * (columns + steps * weights[1] * needs_weights)


def _correlation(
    input1: _Shape,
    input2: _Shape,
    kernel_size: Sequence[int] = (1, 1),
    *_: Any,
    out_shape: _Shape,
    **__: Any,
) -> int:
    return 2 * prod(out_shape) * input1[1] * prod(kernel_size)


def _correlation_backward(
    grad: _Shape,
    other: _Shape,
    of_input2: bool,
    kernel_size: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(grad) * other[1] * prod(kernel_size)


def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> int:
    """Of the keys that there are; of as many as there may be where lengths have no values."""
    batch, heads, length, size = query.shape
    if _has_values(cache_lengths):
        keys = sum(cache_lengths.tolist())
    else:
        pages = 1 if block_table is None else block_table.shape[1]
        keys = batch * pages * key_cache.shape[2]
    return _of_scores(heads * length * keys, size, value_cache.shape[-1], backward=False)


def _varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    scores = _scores_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _of_scores(scores * query.shape[1], query.shape[-1], value.shape[-1], backward=False)


def _varlen_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    scores = _scores_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _of_scores(scores * query.shape[1], query.shape[-1], value.shape[-1], backward=True)


def _scores_of(starts_q: Tensor, starts_k: Tensor, most_q: int, most_k: int) -> int:
    """The scores of a head, in all sequences; of the longest ones where offsets have no values."""
    if not (_has_values(starts_q) and _has_values(starts_k)):
        return (starts_q.shape[0] - 1) * most_q * most_k
    lengths = (starts_q.diff().tolist(), starts_k.diff().tolist())
    return sum(min(q, most_q) * min(k, most_k) for q, k in zip(*lengths, strict=True))


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)))


_FORMULAS: dict[str, Callable[..., int]] = {
    "matmul": _matmul,
    "linear": _linear,
    "linear_forward": _linear,
    "packed_linear": _packed_linear,
    "int4_linear": _int4_linear,
    "rowwise_scaled_linear_s8s4": _rowwise_scaled_linear,
    "rowwise_scaled_linear_s4s4": _rowwise_scaled_linear,
    "lltm": _lltm,
    "lltm_sequence": _lltm,
    "lltm_forward": _lltm,
    "lltm_backward": _lltm_backward,
    "spatial_correlation_sample": _correlation,
    "spatial_correlation_sample_backward": _correlation_backward,
    "scaled_dot_product_attention_forward": _attention_forward,
    "scaled_dot_product_attention_backward": _attention_backward,
}
# They take the tensors themselves.
_RAW_FORMULAS: dict[str, Callable[..., int]] = {
    "decode_attention": _decode_attention,
    "scaled_dot_product_attention_varlen_forward": _varlen_forward,
    "scaled_dot_product_attention_varlen_backward": _varlen_backward,
}
