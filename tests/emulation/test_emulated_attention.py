"""Every attention kernel, run on the CPU by the emulator, against the plain reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import philox
import pytest
import references
import torch
from attention_bounds import Bounds, Problem
from emulator import Argument, Emulator
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SEED = torch.tensor([-(2**62) + 12345])
MOST_SHARED_BYTES = 99 * 1024  # of a block, where there is the least from Ampere on


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def some_of_each_dtype(dtypes: Sequence[torch.dtype], names: Iterable[str]) -> list[Any]:
    """Parameters: every name with the first dtype, and a third of them with each other one."""
    return [
        pytest.param(dtype, name, id=f"{name_of(dtype)}-{name}")
        for position, dtype in enumerate(dtypes)
        for number, name in enumerate(names)
        if position == 0 or (number + position) % 3 == 0
    ]


@dataclass(frozen=True)
class Call:
    """The arguments of one call of attention, with the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    grad_output: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: Tensor | None = None  # of the leading dimensions

    @property
    def group(self) -> int:
        return self.query.shape[-3] // self.key.shape[-3] if self.enable_gqa else 1

    def with_groups(self, tensor: Tensor, of_keys: bool = False) -> Tensor:
        """Divides the dimension of heads into key heads and the queries that share one."""
        if not self.enable_gqa or tensor.dim() < 3:
            return tensor
        if of_keys or tensor.shape[-3] == 1:
            return tensor.unsqueeze(-3)
        return tensor.unflatten(-3, (-1, self.group))

    @property
    def batch(self) -> torch.Size:
        lead = [self.with_groups(self.query).shape[:-2]]
        lead += [self.with_groups(each, True).shape[:-2] for each in (self.key, self.value)]
        return torch.broadcast_shapes(*lead)

    @property
    def rows(self) -> int:
        return self.query.shape[-2]

    @property
    def columns(self) -> int:
        return self.key.shape[-2]

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.rows, self.value.shape[-1])

    @property
    def grouped(self) -> list[Tensor | None]:
        """Query, key, value and mask, in one batch that broadcasts."""
        mask = None if self.mask is None else self.with_groups(torch.atleast_2d(self.mask))
        query = self.with_groups(self.query)
        return [query, *(self.with_groups(each, True) for each in (self.key, self.value)), mask]

    @property
    def grouped_slopes(self) -> Tensor | None:
        """The slopes in the batch of ``grouped``."""
        if self.slopes is None or not self.enable_gqa:
            return self.slopes
        return self.slopes.unflatten(-1, (-1, self.group))

    def kept(self) -> Tensor:
        """Which weights dropout leaves."""
        mask = philox.kept(int(SEED), self.batch.numel(), self.rows, self.columns, self.dropout)
        return mask.view(*self.batch, self.rows, self.columns)


def exact_results(call: Call) -> list[Tensor]:
    """In float64: output, log-sum-exp, the gradients of query, key, value and a floating mask."""
    leaves = [
        each.detach().double().requires_grad_()
        if each is not None and each.is_floating_point()
        else each
        for each in call.grouped
    ]
    query, key, value, mask = leaves
    kept = call.kept() if call.dropout > 0 else None
    slopes = None if call.slopes is None else call.grouped_slopes.double()
    options = (call.is_causal, call.scale, False, *call.window, call.softcap, slopes)
    output = references.scaled_dot_product_attention(
        query, key, value, mask, call.dropout, *options, kept=kept
    )
    log_sum_exp = references.attention_log_sum_exp(query, key, mask, *options)
    assert call.grad_output is not None
    wanted = [each for each in leaves if each is not None and each.requires_grad]
    gradients = torch.autograd.grad(output, wanted, call.grad_output.double())
    log_sum_exp = log_sum_exp.expand(output.shape[:-1])
    return [output.detach(), log_sum_exp.detach(), *gradients]


def bounds_of(call: Call, exact: list[Tensor]) -> list[Tensor]:
    """How far a result may be from each of the exact ones."""
    query, key, value, mask = call.grouped
    assert query is not None
    assert key is not None
    assert value is not None
    assert call.grad_output is not None
    scores = (*call.batch, call.rows, call.columns)
    added = torch.zeros(scores, dtype=torch.float64)
    if call.is_causal:
        added = added.masked_fill(torch.ones(scores[-2:]).tril() == 0, -torch.inf)
    seen = references.keys_in_window(*scores[-2:], *call.window)
    added = added.masked_fill(~seen, -torch.inf)
    if call.slopes is not None:
        added = added + references.alibi_bias(call.grouped_slopes.double(), *scores[-2:])
    if mask is not None and mask.dtype == torch.bool:
        added = added.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        added = added + mask.double()
    factors = torch.ones(scores, dtype=torch.float64)
    if call.dropout > 0:
        factors = call.kept() / (1 - call.dropout) if call.dropout < 1 else factors * 0
    bounds = Bounds(
        Problem(
            query.double(),
            key.double(),
            value.double(),
            added,
            factors,
            query.shape[-1] ** -0.5 if call.scale is None else call.scale,
            accumulator(call),
            query.dtype,
            call.softcap,
        )
    )
    has_mask_gradient = mask is not None and mask.is_floating_point()
    errors = bounds.gradients(call.grad_output.double(), mask if has_mask_gradient else None)
    rounded = [bounds.rounded(*pair) for pair in zip(errors, exact[2:], strict=True)]
    return [bounds.output, bounds.log_sum_exp, *rounded]


def operand(name: str, tensor: Tensor, batch: torch.Size) -> dict[str, Argument]:
    """A batch of matrices, broadcast, and the dimensions of the batch that are its own."""
    lead = tensor.shape[:-2]
    padded = (1,) * (len(batch) - len(lead)) + tuple(lead)
    expanded = tensor.expand(*batch, *tensor.shape[-2:])
    return {
        name: expanded,
        f"{name}_strides": expanded.stride()[-2:],
        f"{name}_batch_strides": expanded.stride()[:-2],
        f"{name}_owned": [int(size == full) for size, full in zip(padded, batch, strict=True)],
    }


def arguments_of(call: Call) -> dict[str, Argument]:
    batch = call.batch
    scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    arguments: dict[str, Argument] = {
        "type": name_of(call.query.dtype),
        "batch": batch,
        "rows": call.rows,
        "columns": call.columns,
        "head_size": call.query.shape[-1],
        "value_size": call.value.shape[-1],
        "scale": float(scale),
        "is_causal": call.is_causal,
        "dropout": float(call.dropout),
        "seed": SEED,
        "window": call.window,
        "softcap": float(call.softcap),
    }
    if call.slopes is not None:
        expanded = call.grouped_slopes.expand(batch)
        arguments["slopes"] = expanded
        arguments["slopes_type"] = name_of(expanded.dtype)
        arguments["slopes_strides"] = expanded.stride()
    *operands, mask = call.grouped
    for name, tensor in zip(["query", "key", "value"], operands, strict=True):
        assert tensor is not None
        arguments |= operand(name, tensor, batch)
    if mask is not None:
        arguments["mask_type"] = name_of(mask.dtype)
        arguments["mask_shape"] = mask.shape[-2:]
        scores = mask.expand(*mask.shape[:-2], call.rows, call.columns)
        arguments |= operand("mask", scores, batch)
    return arguments


def accumulator(call: Call) -> torch.dtype:
    return torch.float64 if call.query.dtype == torch.float64 else torch.float32


def has_residual(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


Outputs = tuple[Tensor, Tensor, Tensor]  # as the forward operator returns them


def emulated_forward(
    emulator: Emulator,
    call: Call,
    blocks: int = 3,
    warpgroups: bool = False,
    copied_panels: bool = False,
    shared_bytes: int = MOST_SHARED_BYTES,
    key_parts: int = 1,
) -> Outputs:
    """Output, log-sum-exp and residual; keys are divided by the kernel of copied panels alone."""
    # As the operator does, dimensions in the order of the query's: heads may be inside.
    output = torch.full(call.output_shape, 77, dtype=call.query.dtype)
    if call.query.dim() == 4 and call.query.stride(1) < call.query.stride(2):
        output = output.transpose(-2, -3).contiguous().transpose(-2, -3)
    log_sum_exp = torch.full(output.shape[:-1], 77, dtype=accumulator(call))
    arguments = arguments_of(call) | operand("output", output, call.batch)
    names = ["output", "log_sum_exp"]
    residual = output.new_empty(0)
    if has_residual(output.dtype):
        residual = output.clone()
        arguments |= operand("output_residual", residual, call.batch)
        names.append("output_residual")
    arguments |= {"log_sum_exp": log_sum_exp, "most_shared_bytes": shared_bytes}
    arguments |= {"warpgroups": warpgroups, "copied_panels": int(copied_panels)}
    numbers = key_parts * log_sum_exp.numel() * (call.value.shape[-1] + 2)
    parts = torch.full((numbers if key_parts > 1 else 0,), 77, dtype=accumulator(call))
    arguments |= {"key_parts": key_parts, "parts": parts, "part_numbers": parts.numel()}
    if key_parts > 1:
        names.append("parts")
    emulator.run("attention_forward", names, blocks, **arguments)
    return output, log_sum_exp, residual


def emulated_backward(
    emulator: Emulator,
    call: Call,
    outputs: Outputs,
    blocks: int = 3,
    shared_bytes: int = MOST_SHARED_BYTES,
    warpgroups: bool = False,
    joint: bool = False,
    copied_panels: bool = False,
) -> list[Tensor]:
    """The gradients of query, key, value and a floating mask.

    Where one kernel makes all of them (``joint``), it is not asked for the mask's.
    """
    assert call.grad_output is not None
    output, log_sum_exp, residual = outputs
    arguments = arguments_of(call) | operand("output", output, call.batch)
    if has_residual(output.dtype):
        arguments |= operand("output_residual", residual, call.batch)
    arguments["log_sum_exp"] = log_sum_exp
    grad_output = call.grad_output.expand(call.output_shape)
    arguments |= operand("grad_output", grad_output, call.batch)
    if call.mask is not None and call.mask.is_floating_point():
        normalized = torch.full_like(output, 77)
        arguments |= operand("normalized", normalized, call.batch)
        kernel = "attention_normalized_grad_output"
        emulator.run(kernel, ["normalized"], blocks, **arguments)
        arguments |= operand("grad_output", normalized, call.batch)
    arguments["delta"] = torch.full_like(log_sum_exp, 77)
    arguments |= {"most_shared_bytes": shared_bytes, "warpgroups": warpgroups}
    arguments["copied_panels"] = int(copied_panels)
    emulator.run("attention_delta", ["delta"], blocks, **arguments)

    def gradients(kernel: str, **tensors: Tensor) -> list[Tensor]:
        results = {
            f"grad_{name}": torch.full(each.shape, 77, dtype=each.dtype)
            for name, each in tensors.items()
        }
        given: dict[str, Argument] = {}
        for name, result in results.items():
            if name == "grad_mask":
                given[name] = result
            else:
                grouped = call.with_groups(result, name != "grad_query")
                given |= operand(name, grouped, call.batch)
        names = [*results, *(["pieces"] if "pieces" in arguments else [])]
        emulator.run(kernel, names, blocks, **given, **arguments)
        return list(results.values())

    if joint:
        inputs = {"query": call.query, "key": call.key, "value": call.value}
        return gradients("attention_joint_gradients", **inputs)
    results = gradients("attention_grad_query", query=call.query)
    owned = [arguments["key_owned"], arguments["value_owned"]]
    if owned[0] == owned[1]:
        results += gradients("attention_grad_key_value", key=call.key, value=call.value)
    else:
        results += gradients("attention_grad_key_value", key=call.key)
        arguments["key_owned"] = owned[1]
        results += gradients("attention_grad_key_value", value=call.value)
    if call.mask is not None and call.mask.is_floating_point():
        pieces = torch.zeros(1, dtype=torch.int64)
        arguments["pieces"] = pieces
        results += gradients("attention_grad_mask", mask=call.mask)
        # However few elements the mask has, no block has more to do than a tile of scores.
        tiles = -(-call.rows // 64) * -(-call.columns // 64) * call.batch.numel()
        assert int(pieces) == tiles
    return results


RESULTS = ["output", "log_sum_exp", "grad_query", "grad_key", "grad_value", "grad_mask"]


def assert_near(
    names: Sequence[str],
    results: Sequence[Tensor],
    exact: Sequence[Tensor],
    bounds: Sequence[Tensor],
) -> None:
    """Each of the results that is there is within its bound of the exact one."""
    for name, result, value, bound in zip(names, results, exact, bounds, strict=False):
        error = (result.reshape(value.shape).double() - value).abs()
        agrees = (error <= bound) | (result.reshape(value.shape) == value)
        assert agrees.all(), f"{name}: {(error / bound).max().item():.2f} times its bound"


def compare_gradients(call: Call, gradients: Sequence[Tensor]) -> None:
    """The gradients of query, key and value with the exact ones."""
    exact = exact_results(call)
    assert_near(RESULTS[2:5], gradients, exact[2:], bounds_of(call, exact)[2:])


def check(
    emulator: Emulator, call: Call, blocks: int = 3, shared_bytes: int = MOST_SHARED_BYTES
) -> list[Tensor]:
    """Compare the output, the log-sum-exp and the gradients with the exact ones."""
    outputs = emulated_forward(emulator, call, blocks, shared_bytes=shared_bytes)
    gradients = emulated_backward(emulator, call, outputs, blocks, shared_bytes)
    results = [*outputs[:2], *gradients]
    exact = exact_results(call)
    assert_near(RESULTS, results, exact, bounds_of(call, exact))
    return results


def make(
    *lead: int,
    rows: int = 5,
    columns: int = 7,
    head: int = 4,
    value_head: int | None = None,
    dtype: torch.dtype = torch.float32,
    key_lead: tuple[int, ...] | None = None,
    **options: object,
) -> Call:
    key_lead = lead if key_lead is None else key_lead
    call = Call(
        torch.randn(*lead, rows, head, dtype=torch.float64).to(dtype),
        torch.randn(*key_lead, columns, head, dtype=torch.float64).to(dtype),
        torch.randn(*key_lead, columns, value_head or head, dtype=torch.float64).to(dtype),
        **options,  # type: ignore[arg-type]
    )
    grad_output = torch.randn(call.output_shape, dtype=torch.float64).to(dtype)
    return replace(call, grad_output=grad_output)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (63, 65), (64, 64), (65, 63), (65, 129), (128, 1), (1, 200)]
)
def test_lengths_around_every_tile_boundary(
    cuda_emulator: Emulator, dtype: torch.dtype, rows: int, columns: int
) -> None:
    check(cuda_emulator, make(rows=rows, columns=columns, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("head", "value_head"),
    [(1, 1), (15, 17), (16, 16), (63, 65), (64, 64), (65, 3), (3, 128), (128, 129), (200, 260)],
)
def test_head_sizes_around_every_panel_and_tile(
    cuda_emulator: Emulator, dtype: torch.dtype, head: int, value_head: int
) -> None:
    check(cuda_emulator, make(2, head=head, value_head=value_head, dtype=dtype))


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize(("head", "value_head"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_memory_of_every_device(
    cuda_emulator: Emulator, head: int, value_head: int, kibibytes: int
) -> None:
    """One place or two for what is loaded in turns, or none: then the kernels without it."""
    call = make(rows=130, columns=140, head=head, value_head=value_head, dtype=torch.bfloat16)
    check(cuda_emulator, call, shared_bytes=kibibytes * 1024)


FEATURES_OF_WIDE_HEADS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window and cap": {"window": (40, 20), "softcap": 3.0},
    "mask and dropout": {"mask": torch.linspace(-2, 1, 140), "dropout": 0.3},
    "slopes of groups": {
        "enable_gqa": True,
        "key_lead": (1,),
        "slopes": torch.tensor([0.5, 0.1]),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("features", FEATURES_OF_WIDE_HEADS.values(), ids=FEATURES_OF_WIDE_HEADS)
@pytest.mark.parametrize(("head", "value_head"), [(256, 256), (192, 128), (160, 40), (40, 200)])
def test_wide_heads_where_memory_is_short(
    cuda_emulator: Emulator, head: int, value_head: int, features: dict[str, Any]
) -> None:
    dtype = torch.float16 if value_head == 128 else torch.bfloat16
    call = make(2, rows=130, columns=140, head=head, value_head=value_head, dtype=dtype, **features)
    check(cuda_emulator, call)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("rows", "columns"), [(70, 70), (64, 130), (130, 64), (3, 1)])
def test_causal(cuda_emulator: Emulator, dtype: torch.dtype, rows: int, columns: int) -> None:
    check(cuda_emulator, make(rows=rows, columns=columns, dtype=dtype, is_causal=True))


WINDOWS = [(0, 0), (5, 0), (-1, 0), (70, -1), (3, 66), (500, 500)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("rows", "columns"), [(70, 70), (64, 200), (200, 64), (3, 1)])
def test_windows(
    cuda_emulator: Emulator, rows: int, columns: int, window: tuple[int, int], dtype: torch.dtype
) -> None:
    check(cuda_emulator, make(rows=rows, columns=columns, window=window, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_window_with_causality_and_with_a_mask(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    window = (40, 3)
    check(cuda_emulator, make(rows=66, columns=140, dtype=dtype, is_causal=True, window=window))
    mask = torch.randn(66, 140).to(dtype)
    check(cuda_emulator, make(3, rows=66, columns=140, dtype=dtype, mask=mask, window=window))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_scores(cuda_emulator: Emulator, dtype: torch.dtype, softcap: float) -> None:
    mask = torch.randn(66, 70).to(dtype)
    check(cuda_emulator, make(3, rows=66, columns=70, dtype=dtype, softcap=softcap, mask=mask))
    check(cuda_emulator, make(head=100, dtype=dtype, softcap=softcap))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 1)])
def test_slopes(cuda_emulator: Emulator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    slopes = torch.rand(shape)
    for given in [slopes] if dtype == torch.float32 else [slopes, slopes.to(dtype)]:
        check(cuda_emulator, make(2, 6, rows=9, columns=70, dtype=dtype, slopes=given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_slopes_of_grouped_heads(
    cuda_emulator: Emulator, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    options = {"enable_gqa": True, "softcap": 2.0, "window": (30, 0), "dropout": 0.3}
    slopes = torch.rand(shape)
    call = make(2, 6, key_lead=(2, 2), rows=9, columns=70, slopes=slopes, dtype=dtype, **options)
    check(cuda_emulator, call)


MASKS = {
    "full": (2, 3, 66, 70),
    "matrix": (66, 70),
    "keys": (70,),
    "keys of each batch": (2, 1, 1, 70),
    "queries": (3, 66, 1),
    "heads": (3, 1, 1),
    "one": (1, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.float64], ids=name_of)
def test_masks(cuda_emulator: Emulator, shape: tuple[int, ...], mask_dtype: torch.dtype) -> None:
    dtype = torch.float64 if mask_dtype == torch.float64 else torch.float32
    mask = torch.randn(shape, dtype=torch.float64)
    mask = mask > -0.5 if mask_dtype == torch.bool else mask.to(mask_dtype)
    check(cuda_emulator, make(2, 3, rows=66, columns=70, dtype=dtype, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("wide", [False, True])
def test_masks_of_halves(cuda_emulator: Emulator, dtype: torch.dtype, wide: bool) -> None:
    mask = torch.randn(3, 1, 70).to(torch.float32 if wide else dtype)
    check(cuda_emulator, make(3, rows=20, columns=70, dtype=dtype, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("mask_heads", [None, 1, 6])
def test_grouped_queries(
    cuda_emulator: Emulator, mask_heads: int | None, dtype: torch.dtype
) -> None:
    mask = None if mask_heads is None else torch.randn(2, mask_heads, 9, 70)
    options = {"rows": 9, "columns": 70, "enable_gqa": True, "mask": mask}
    check(cuda_emulator, make(2, 6, key_lead=(2, 2), dtype=dtype, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [((2, 1), (2, 3), (2, 3)), ((2, 3), (3,), (3,)), ((1, 3), (2, 1), (3,)), ((3,), (), (2, 1))],
)
def test_leading_dimensions_broadcast(
    cuda_emulator: Emulator,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    shapes = [(*query, 5, 6), (*key, 7, 6), (*value, 7, 4)]
    call = Call(*(torch.randn(shape).to(dtype) for shape in shapes))
    grad_output = torch.randn(call.output_shape).to(dtype)
    check(cuda_emulator, replace(call, grad_output=grad_output))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_dropout(cuda_emulator: Emulator, dtype: torch.dtype, dropout: float) -> None:
    call = make(2, rows=66, columns=70, dtype=dtype, dropout=dropout, is_causal=True)
    check(cuda_emulator, call)
    call = make(2, 4, key_lead=(2, 2), dtype=dtype, dropout=dropout, enable_gqa=True)
    check(cuda_emulator, call)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 2, 64), (1, 300, 7), (2, 0, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.25, 1.0])
def test_dropout_mask_is_the_one_of_the_cpu(
    cuda_emulator: Emulator, shape: tuple[int, int, int], dropout: float
) -> None:
    kept = torch.zeros(shape, dtype=torch.bool)
    cuda_emulator.run(
        "attention_dropout_mask", ["kept"], kept=kept, shape=shape, dropout=dropout, seed=SEED
    )
    assert torch.equal(kept, philox.kept(int(SEED), *shape, dropout))
    assert torch.equal(kept, torch.ops.pkg.attention_dropout_mask(SEED, *shape, dropout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", ["heads inside", "step", "transposed", "misaligned"])
def test_layouts(cuda_emulator: Emulator, layout: str, dtype: torch.dtype) -> None:
    def arrange(tensor: Tensor) -> Tensor:
        if layout == "heads inside":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "step":
            return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
        if layout == "transposed":
            return tensor.mT.contiguous().mT
        padded = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype)
        padded[1:] = tensor.flatten()
        return padded[1:].view(tensor.shape)

    call = make(2, 3, rows=33, columns=40, head=16, dtype=dtype)
    assert call.grad_output is not None
    arranged = replace(
        call,
        query=arrange(call.query),
        key=arrange(call.key),
        value=arrange(call.value),
        grad_output=arrange(call.grad_output),
    )
    results = check(cuda_emulator, arranged)
    ones = torch.ones(1, dtype=dtype).expand(call.output_shape)
    check(cuda_emulator, replace(call, grad_output=ones))
    for result, plain in zip(results, check(cuda_emulator, call), strict=True):
        torch.testing.assert_close(result, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lead", "rows", "columns"), [((2,), 5, 0), ((2,), 0, 5), ((0,), 5, 5), ((2,), 0, 0)]
)
def test_empty(cuda_emulator: Emulator, lead: tuple[int, ...], rows: int, columns: int) -> None:
    call = make(*lead, rows=rows, columns=columns)
    outputs = emulated_forward(cuda_emulator, call)
    output, log_sum_exp, _ = outputs
    gradients = emulated_backward(cuda_emulator, call, outputs)
    assert all((each == 0).all() for each in [output, *gradients])
    assert (log_sum_exp == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_a_row_without_keys_is_zero_and_passes_no_gradient(
    cuda_emulator: Emulator, kind: str, dtype: torch.dtype
) -> None:
    mask = torch.rand(66, 70) > 0.3
    mask[[0, 40, 65]] = False
    if kind == "float":
        mask = torch.zeros(66, 70).masked_fill(~mask, -torch.inf)
    results = check(cuda_emulator, make(2, rows=66, columns=70, mask=mask, dtype=dtype))
    output, _, grad_query = results[:3]
    for result in (output, grad_query):
        assert (result[:, [0, 40, 65]] == 0).all()


HIDDEN = slice(60, 67)  # rows of two tiles


def with_hidden_rows(call: Call) -> tuple[Call, Call]:
    """A mask that hides the rows by a large finite number, and a call with the same scores.

    The number is so large that nothing is left of a product beside it: every key of those rows has
    the same weight, as where the query is zero.
    """
    assert call.mask is not None
    mask, query = call.mask.clone(), call.query.clone()
    mask[..., HIDDEN, :] = torch.finfo(mask.dtype).min / 2
    same = call.mask.clone()
    same[..., HIDDEN, :] = query[..., HIDDEN, :] = 0
    return replace(call, mask=mask), replace(call, mask=same, query=query)


def grad_scores_of_hidden_rows(call: Call) -> Tensor:
    """Exactly, where the weights of all keys that a row sees are the same."""
    assert call.grad_output is not None
    weights = torch.ones(call.rows, call.columns, dtype=torch.float64)
    weights = weights.tril() if call.is_causal else weights
    weights = (weights / weights.sum(-1, keepdim=True))[HIDDEN]
    factors = call.kept().double()[..., HIDDEN, :] / (1 - call.dropout) if call.dropout else 1
    grad_output = call.grad_output.double()[..., HIDDEN, :]
    value = call.with_groups(call.value.double(), True)
    grad_weights = grad_output @ value.mT * factors
    delta = (grad_output * (weights * factors @ value)).sum(-1, keepdim=True)
    return weights * (grad_weights - delta)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kind", ["own", "float32", "causal", "dropout", "grouped"])
def test_gradients_of_rows_that_a_large_number_hides(
    cuda_emulator: Emulator, dtype: torch.dtype, kind: str
) -> None:
    rows, columns = 70, 140
    mask_dtype = dtype if kind == "own" or dtype == torch.float64 else torch.float32
    options: dict[str, Any] = {"causal": {"is_causal": True}, "dropout": {"dropout": 0.3}}.get(
        kind, {}
    )
    lead, key_lead = ((2, 4), (2, 2)) if kind == "grouped" else ((2,), (2,))
    call = make(
        *lead,
        key_lead=key_lead,
        rows=rows,
        columns=columns,
        head=16,
        dtype=dtype,
        mask=torch.randn(rows, columns).to(mask_dtype),
        enable_gqa=kind == "grouped",
        **options,
    )
    hiding, same = with_hidden_rows(call)
    outputs = emulated_forward(cuda_emulator, hiding)
    results = [outputs[0], *emulated_backward(cuda_emulator, hiding, outputs)]
    exact = exact_results(same)
    bounds = bounds_of(same, exact)
    # A key's gradient is made of the query, which the other call has as zero.
    query = call.with_groups(call.query.double())[..., HIDDEN, :]
    grad_scores = grad_scores_of_hidden_rows(call)
    scale = 16**-0.5
    missing = scale * grad_scores.mT @ query
    spread = scale * grad_scores.abs().mT @ query.abs()
    relative = 4 * (columns + 16) * torch.finfo(accumulator(call)).eps
    relative += 4 * torch.finfo(dtype).eps
    like = call.with_groups(call.key, True)
    exact[3] = exact[3] + missing.sum_to_size(like.shape)
    bounds[3] = bounds[3] + relative * spread.sum_to_size(like.shape)
    names = ["output", *RESULTS[2:]]
    assert_near(names, results, [exact[0], *exact[2:]], [bounds[0], *bounds[2:]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_the_residual_is_what_rounding_takes_off(
    cuda_emulator: Emulator, dtype: torch.dtype
) -> None:
    """Of means of 64 whole numbers, which float32 holds and the two parts do together."""
    call = make(2, rows=66, columns=64, head=8, value_head=70, dtype=dtype)
    limit = int(2 / torch.finfo(dtype).eps)  # whole numbers up to there have no more digits
    value = torch.randint(-limit, limit + 1, call.value.shape).to(dtype)
    output, _, residual = emulated_forward(
        cuda_emulator, replace(call, query=torch.zeros_like(call.query), value=value)
    )
    assert (residual != 0).any()
    mean = value.double().mean(-2, keepdim=True)
    assert torch.equal(output.double() + residual.double(), mean.expand(output.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_comes_out_as_nan(cuda_emulator: Emulator, where: str, dtype: torch.dtype) -> None:
    call = make(2, rows=66, columns=70, head=8, dtype=dtype)
    tensor = getattr(call, where)
    tensor[0, 65, 7] = torch.nan
    outputs = emulated_forward(cuda_emulator, call)
    output = outputs[0]
    gradients = emulated_backward(cuda_emulator, call, outputs)
    rows = slice(65, 66) if where == "query" else slice(None)
    columns = slice(7, 8) if where == "value" else slice(None)
    assert output[0, rows, columns].isnan().all()
    assert output[0].isnan().sum() == output[0, rows, columns].numel()
    reached = gradients[:2] if where == "value" else gradients
    assert all(gradient[0].isnan().any() for gradient in reached)
    assert not any(result[1].isnan().any() for result in [output, *gradients])


def test_keys_that_are_masked_out_may_hold_nan(cuda_emulator: Emulator) -> None:
    call = make(2, rows=5, columns=70)
    mask = torch.ones(70, dtype=torch.bool)
    mask[66:] = False
    masked = replace(call, mask=mask)
    expected = emulated_forward(cuda_emulator, masked)[0]
    call.key[:, 66:] = torch.nan
    output = emulated_forward(cuda_emulator, masked)[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize("scale", [0.0, -0.5, 30.0])
def test_scales(cuda_emulator: Emulator, scale: float, dtype: torch.dtype) -> None:
    check(cuda_emulator, make(2, rows=9, columns=70, scale=scale, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
def test_results_do_not_depend_on_the_grid_or_the_order_of_threads(
    cuda_emulator: Emulator, dtype: torch.dtype
) -> None:
    mask = torch.randn(2, 1, 1, 70)
    call = make(2, 2, rows=66, columns=70, mask=mask, dropout=0.2, dtype=dtype)
    results = [check(cuda_emulator, call, blocks) for blocks in (1, 2, 100)]
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))
