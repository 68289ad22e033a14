"""Calls of every operator, in sizes around the edges of tiles: what ``gpu_check.py sample`` makes.

What a call reads is made beforehand, so that the call itself neither copies to the device nor waits
for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkg import ops

ROOT = Path(__file__).parents[1]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 63, 65, 129)  # around the tiles of 64 and 128
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on inputs of its own; its results are the gradients too."""

    name: str
    run: Callable[[], list[Tensor]]
    is_random: bool = False  # draws from PyTorch's generator


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Makes tensors of one dtype on one device."""

    device: torch.device
    dtype: torch.dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Between 0 and 1."""
        return torch.rand(shape, device=self.device).to(dtype or self.dtype)

    def integers(self, least: int, most: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Between both bounds, which occur."""
        return torch.randint(least, most + 1, shape, device=self.device).to(dtype)

    def offsets(self, *values: int) -> Tensor:
        """Where sequences begin, or how long they are."""
        return torch.tensor(values, device=self.device)


def both_ways(function: Callable[..., Any], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Without a gradient, then recording one of every input."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            plain = tensors_of(function(*inputs))
        leaves = [each.detach().requires_grad_() for each in inputs]
        outputs = tensors_of(function(*leaves))
        upstream = [torch.ones_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        return [*plain, *(output.detach() for output in outputs), *gradients]

    return run


def only_forward(function: Callable[..., Any], *inputs: Any) -> Callable[[], list[Tensor]]:
    """For what has no gradient."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return tensors_of(function(*inputs))

    return run


def tensors_of(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The results of an operator that has one or several."""
    return [result] if isinstance(result, Tensor) else list(result)


def pointwise(make: Inputs, size: int) -> Iterator[Call]:
    """Dense operands, broadcast ones and transposed ones."""
    a, b, out = make.floats(size, 70), make.floats(70, size), make.floats(size, 70)

    def add() -> list[Tensor]:
        ops.add_out(a, a[:1], out=out)
        return [out]

    yield Call("add_out", add)
    yield Call("d_sigmoid", both_ways(ops.d_sigmoid, a))
    yield Call("mul", both_ways(ops.mul, a, b.mT))
    yield Call("muladd", both_ways(lambda x, y: ops.muladd(x, y, 0.5), a, a[:1]))


def elementwise(make: Inputs, size: int) -> Iterator[Call]:
    """Every operator that is made of a formula, by its schema: a new one needs no line here."""
    for source in sorted((ROOT / "csrc" / "cpu").glob("*.cpp")):
        for name in re.findall(r"^PKG_ELEMENTWISE\((\w+)", source.read_text(), re.MULTILINE):
            operator = getattr(torch.ops.pkg, name).default
            values = {"Tensor": make.floats(size, 70), "float": 0.5, "int": 1, "bool": True}
            arguments = [values[str(each.type)] for each in operator._schema.arguments]
            yield Call(name, only_forward(operator, *arguments))


def products(make: Inputs, size: int) -> Iterator[Call]:
    """Batched products, and linear with every activation."""
    a, weight, bias = make.floats(size, 70), make.floats(66, 70), make.floats(66)
    yield Call("matmul", both_ways(ops.matmul, a, make.floats(2, 70, size)))
    packed = ops.pack_linear_weight(weight)
    yield Call("pack_linear_weight", only_forward(ops.pack_linear_weight, weight))
    for activation in ACTIVATIONS:
        linear = both_ways(lambda *given, act=activation: ops.linear(*given, act), a, weight, bias)
        yield Call(f"linear, {activation}", linear)
        arguments = (a, packed, 66, bias, activation)
        yield Call(f"packed_linear, {activation}", only_forward(ops.packed_linear, *arguments))
    few, weight = make.floats(3, 512), make.floats(72, 512)
    yield Call("matmul of few rows", both_ways(ops.matmul, few, make.floats(512, 72)))
    yield Call("matmul by a vector", both_ways(ops.matmul, weight, few[0]))
    linear = both_ways(lambda *given: ops.linear(*given, "silu"), few, weight, make.floats(72))
    yield Call("linear of few rows", linear)


def attention(make: Inputs, size: int) -> Iterator[Call]:
    """Masks of many elements and of one, causality, windows, caps, slopes and dropout."""
    for head in (20, 130):
        inputs = [make.floats(2, 3, size, head) for _ in range(3)]
        slopes = make.floats(3, dtype=torch.float32)
        capped = {"softcap": 3.0, "window_left": 40, "alibi_slopes": slopes}
        for name, options in (("causal", {"is_causal": True}), ("capped", capped)):
            dense = both_ways(
                lambda *given, o=options: ops.scaled_dot_product_attention(*given, **o), *inputs
            )
            yield Call(f"attention of {head}, {name}", dense)
        for shape in ((size, size), (3, 1, size), (1, 1)):
            mask = make.floats(*shape)
            masked = both_ways(ops.scaled_dot_product_attention, *inputs, mask)
            yield Call(f"attention of {head}, mask {shape}", masked)
        dropped = both_ways(
            lambda *given: ops.scaled_dot_product_attention(*given, dropout_p=0.5), *inputs
        )
        yield Call(f"attention of {head}, dropout", dropped, is_random=True)
    seed = make.offsets(7)
    shape = (6, size, size, 0.5)
    mask_of_dropout = torch.ops.pkg.attention_dropout_mask
    yield Call("attention_dropout_mask", only_forward(mask_of_dropout, seed, *shape))


def packed_attention(make: Inputs, size: int) -> Iterator[Call]:
    """Sequences with an empty one among them, and tokens of none around them."""
    # Two tokens in front of the sequences, and five behind them.
    starts = make.offsets(2, size + 2, size + 2, size + 42)
    longest = max(size, 40)
    for head in (20, 130):
        inputs = [make.floats(size + 47, 3, head) for _ in range(3)]
        for dropout in (0.0, 0.5):
            options = (starts, starts, longest, longest, dropout, None, True)
            packed = both_ways(
                lambda *given, o=options: ops.scaled_dot_product_attention_varlen(*given, *o),
                *inputs,
            )
            yield Call(f"varlen of {head}, dropout {dropout}", packed, is_random=dropout > 0)


def rotary(make: Inputs, size: int) -> Iterator[Call]:
    """Heads of whole packets and of others, whole or in part, in both kinds of pairs."""
    for head, half in ((64, 32), (80, 16), (21, 5)):
        x = make.floats(2, size, 3, head).transpose(1, 2)
        for dtype in (make.dtype, torch.float32):
            tables = [make.floats(size, half, dtype=dtype) for _ in range(2)]
            for pairs in (False, True):
                turn = both_ways(
                    lambda *given, p=pairs: ops.rotary_embedding(*given, interleaved=p), x, *tables
                )
                yield Call(f"rotary_embedding of {head}, tables of {dtype}, {pairs}", turn)


def decoding(make: Inputs, size: int) -> Iterator[Call]:
    """One query and several, on caches in one piece and in pages."""
    lengths = make.offsets(size, size // 2)
    slopes = make.floats(6, dtype=torch.float32)
    for head in (20, 130):
        caches = [make.floats(2, 3, size, head) for _ in range(2)]
        pages = [make.floats(2 * size, 3, 1, head) for _ in range(2)]
        table = torch.arange(2 * size, device=make.device).view(2, size)
        for rows in (1, 4):
            query = make.floats(2, 6, rows, head)
            decode = only_forward(ops.decode_attention, query, *caches, lengths)
            yield Call(f"decode_attention of {head}", decode)
            arguments = (query, *pages, lengths, table, None, 40, 3.0, slopes)
            paged = only_forward(ops.decode_attention, *arguments)
            yield Call(f"decode_attention of {head}, paged", paged)


def recurrent(make: Inputs, size: int) -> Iterator[Call]:
    """One step, and a sequence of three."""
    features, states = 20, 33
    weights, bias = make.floats(3 * states, states + features), make.floats(3 * states)
    before = (make.floats(size, states), make.floats(size, states))
    step = both_ways(ops.lltm, make.floats(size, features), weights, bias, *before)
    yield Call("lltm", step)
    sequence = make.floats(3, size, features)
    yield Call("lltm_sequence", both_ways(ops.lltm_sequence, sequence, weights, bias, *before))


def correlation(make: Inputs, size: int) -> Iterator[Call]:
    """A window of one pixel and of nine."""
    images = [make.floats(2, 5, 9, size) for _ in range(2)]
    for kernel, options in ((1, (3, 1, 0, 1, 2)), (3, (5, 2, 1, 1, 1))):
        correlate = both_ways(
            lambda a, b, k=kernel, o=options: ops.spatial_correlation_sample(a, b, k, *o),
            *(each.clone() for each in images),
        )
        if kernel <= size + 2 * options[2]:
            yield Call(f"spatial_correlation_sample of {kernel}", correlate)


def quantised(make: Inputs, size: int) -> Iterator[Call]:
    """Weights of four bits in both layouts, and rows with a scale each."""
    out_features, in_features, group, tiles = 8 * -(-size // 8), 256, 128, 4
    numbers = make.integers(0, 15, out_features, in_features, dtype=torch.int32)
    pack = ops.pack_tensor_core_tiled_layout
    yield Call("pack_tensor_core_tiled_layout", only_forward(pack, numbers, tiles))
    packed = pack(numbers, tiles)
    unpack = ops.unpack_tensor_core_tiled_layout
    yield Call("unpack_tensor_core_tiled_layout", only_forward(unpack, packed, tiles))
    scales = make.floats(in_features // group, out_features, 2, dtype=torch.bfloat16)
    layout = (packed, scales, group, tiles)
    dequantize = only_forward(ops.dequantize_tensor_core_tiled_layout, *layout)
    yield Call("dequantize_tensor_core_tiled_layout", dequantize)
    for rows in (1, size):
        product = both_ways(
            lambda given, bias: ops.int4_linear(given, *layout, bias),
            *(make.floats(rows, in_features), make.floats(out_features)),
        )
        yield Call("int4_linear", product)

    for bits in (8, 4):
        yield Call(
            "quantize_rowwise", only_forward(ops.quantize_rowwise, make.floats(size, 70), bits)
        )
    # The last fits what CUTLASS's kernels take; of the one before few rows have a kernel of their
    # own, and more are divided along the longer dimension.
    for inner, columns in ((70, 67), (2080, 67), (128, 128)):
        weight = make.integers(-128, 127, columns, inner // 2, dtype=torch.int8)
        scaled = (weight, make.floats(columns), make.floats(columns))
        for operator, width in (
            (ops.rowwise_scaled_linear_s8s4, inner),
            (ops.rowwise_scaled_linear_s4s4, inner // 2),
        ):
            rows = make.integers(-128, 127, size, width, dtype=torch.int8)
            linear = only_forward(operator, rows, make.floats(size), *scaled)
            yield Call(operator.__name__, linear)


def of_integers(make: Inputs) -> Iterator[Call]:
    """What is not floating."""
    numbers = make.integers(-128, 127, 65, 65, dtype=torch.int8)
    product = only_forward(lambda a: ops.matmul(a, a, out_dtype=torch.int32), numbers)
    yield Call("matmul of int8", product)
    yield Call("mul of int8", only_forward(ops.mul, numbers, numbers.mT))


GROUPS = (
    *(pointwise, elementwise, products, attention, packed_attention, rotary, decoding),
    *(recurrent, correlation, quantised),
)


def calls(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = DTYPES,
    sizes: Sequence[int] = SIZES,
) -> Iterator[Call]:
    """Every call of the sample; the name of each says its dtype and size."""
    for dtype in dtypes:
        make = Inputs(device, dtype)
        for size in sizes:
            for group in GROUPS:
                for call in group(make, size):
                    yield dataclasses.replace(call, name=f"{call.name}: {dtype}, size {size}")
    yield from of_integers(Inputs(device, torch.float32))
