"""What torch.utils.flop_counter counts for the operators: as for PyTorch's of the same products."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import pkg


def flops(function: Callable[..., object], *arguments: object) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def trained(function: Callable[..., Tensor]) -> Callable[..., None]:
    def call(*tensors: Tensor) -> None:
        leaves = [each.clone().requires_grad_() for each in tensors]
        function(*leaves).sum().backward()

    return call


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "shapes"),
    [
        (pkg.ops.matmul, torch.matmul, [(5, 7), (7, 3)]),
        (pkg.ops.matmul, torch.matmul, [(2, 5, 7), (2, 7, 3)]),
        (pkg.ops.linear, nn.functional.linear, [(5, 7), (3, 7)]),
        (pkg.ops.linear, nn.functional.linear, [(2, 5, 7), (3, 7), (3,)]),
    ],
)
def test_products(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    training: bool,
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    wrap = trained if training else lambda function: function
    expected = flops(wrap(theirs), *tensors)
    assert expected > 0
    assert flops(wrap(ours), *tensors) == expected


@pytest.mark.parametrize("quantise", [pkg.quantize_, pkg.replace_modules])
def test_models(quantise: Callable[[nn.Module], nn.Module]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128, bias=False))

    options = {"group_size": 64} if quantise is pkg.quantize_ else {}
    input = torch.randn(3, 128)
    assert flops(quantise(model(), **options), input) == flops(model(), input) == 2 * 3 * 128 * 128


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_of_integers(bits: int) -> None:
    layer = pkg.nn.RowwiseScaledLinear.from_linear(nn.Linear(64, 32), bits)
    assert flops(layer, torch.randn(2, 3, 64)) == 2 * 6 * 64 * 32


def test_packed_weights() -> None:
    layer = pkg.nn.Linear(64, 32).eval()
    packed = pkg.ops.pack_linear_weight(layer.weight.detach())
    assert flops(pkg.ops.packed_linear, torch.randn(2, 3, 64), packed, 32) == 2 * 6 * 64 * 32


def test_attention() -> None:
    """Its five products backward are PyTorch's too; heads and batches that are shared count."""
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return pkg.ops.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    scores = 2 * 4 * 5 * 7
    forward, backward = 2 * scores * (8 + 6), 2 * scores * (3 * 8 + 2 * 6)
    assert flops(attend, query, key, value) == forward
    assert flops(trained(attend), query, key, value) == forward + backward
    shared = key[:, :1]
    assert flops(pkg.ops.scaled_dot_product_attention, query, shared, shared) == 2 * scores * 16


def test_attention_of_sequences() -> None:
    starts = torch.tensor([0, 2, 5])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets = starts.to(query.device)
        return pkg.ops.scaled_dot_product_attention_varlen(
            query, key, value, offsets, offsets, 3, 3
        )

    tensors = [torch.randn(5, 2, 8) for _ in range(3)]
    scores = 2 * (2 * 2 + 3 * 3)
    assert flops(attend, *tensors) == 2 * scores * 16
    assert flops(trained(attend), *tensors) == 2 * scores * (16 + 40)
    # Offsets without values: as if all were of the greatest length.
    with torch.device("meta"):
        tensors = [torch.empty(5, 2, 8) for _ in range(3)]
        assert flops(attend, *tensors) == 2 * 2 * (2 * 3 * 3) * 16


def test_decoding() -> None:
    query, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8)
    lengths = torch.tensor([5, 12])
    assert flops(pkg.ops.decode_attention, query, cache, cache, lengths) == 2 * 4 * 17 * 16
    pages, table = torch.randn(6, 2, 4, 8), torch.arange(6).view(2, 3)
    paged = (query, pages, pages, lengths, table)
    assert flops(pkg.ops.decode_attention, *paged) == 2 * 4 * 17 * 16
    # Lengths without values: as if the caches were full.
    assert flops(pkg.ops.decode_attention, *(each.to("meta") for each in paged)) == 2 * 4 * 24 * 16


@pytest.mark.parametrize("steps", [(), (3,)])
def test_cells(steps: tuple[int, ...]) -> None:
    """Backward a product with the weights for each input and state, and one for the weights."""
    input, weights, bias = torch.randn(*steps, 5, 6), torch.randn(12, 10), torch.randn(12)
    old_h, old_cell = torch.randn(5, 4), torch.randn(5, 4)
    function = pkg.ops.lltm_sequence if steps else pkg.ops.lltm
    count = steps[0] if steps else 1
    forward = 2 * count * 5 * 12 * 10
    assert flops(function, input, weights, bias, old_h, old_cell) == forward

    def train(*tensors: Tensor) -> Tensor:
        return function(*tensors)[0]

    assert flops(trained(train), input, weights, bias, old_h, old_cell) == 3 * forward
    weights.requires_grad_()

    def train_weights() -> None:
        function(input, weights, bias, old_h, old_cell)[0].sum().backward()

    states = 2 * (count - 1) * 5 * 12 * 4
    assert flops(train_weights) == 2 * forward + states


def test_correlation() -> None:
    images = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)

    def correlate(first: Tensor, second: Tensor) -> Tensor:
        return pkg.ops.spatial_correlation_sample(first, second, kernel_size=3, patch_size=5)

    assert correlate(*images).shape == (2, 5, 5, 7, 6)
    forward = 2 * (2 * 25 * 7 * 6) * 3 * 9
    assert flops(correlate, *images) == forward
    assert flops(trained(correlate), *images) == 3 * forward


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert flops(pkg.ops.linear, torch.empty(5, 7), torch.empty(3, 7)) == 2 * 5 * 7 * 3


def test_the_counter_is_not_imported_for_it() -> None:
    """And what is imported later is the module that it would be without this package."""
    program = """
import inspect, sys, torch, pkg
assert "torch.utils.flop_counter" not in sys.modules
finders = len(sys.meta_path)
import torch.utils.flop_counter as counter
assert len(sys.meta_path) == finders - 1
assert torch.ops.pkg.linear in counter.flop_registry
assert "flop_registry" in inspect.getsource(counter)
assert type(counter.__loader__).__name__ == type(counter.__spec__.loader).__name__
assert type(counter.__loader__) is type(torch.__loader__)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
