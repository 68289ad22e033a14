"""Arguments of lltm and lltm_sequence, for the tests of both."""

from __future__ import annotations

import torch
from samples import around, normal
from torch import Tensor

from pkg.testing import ErrorSample, Sample

Shape = tuple[int, int, int]
# Of batch, features and states; around the register tiles and cache blocks of the product.
SMALL: list[Shape] = [(3, 5, 4), (1, 2, 3), (20, 33, 17)]
EMPTY: list[Shape] = [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)]
TILES = around(4, 6, 8, 12, 16, 32, 48, 64, 128)


def tensors(shape: Shape, steps: int | None = None, row: bool = True) -> tuple[Tensor, ...]:
    """The five arguments; weights such that the gates are neither shut nor wide open."""
    batch, features, states = shape
    lead = (batch,) if steps is None else (steps, batch)
    scale = max(features + states, 1) ** -0.5
    return (
        normal(*lead, features),
        normal(3 * states, states + features, seed=1) * scale,
        normal(*((1, 3 * states) if row else (3 * states,)), seed=2),
        normal(batch, states, seed=3),
        normal(batch, states, seed=4),
    )


def call(shape: Shape, steps: int | None = None, row: bool = True, **options: object) -> Sample:
    return Sample(tensors(shape, steps, row), **options)


def sizes_around_tiles(steps: int | None = None) -> list[Sample]:
    samples = []
    for size in TILES:
        for shape in ((size, 7, 5), (5, size, 7), (7, 5, size), (size,) * 3):
            samples.append(call(shape, steps, size % 2 == 0, values_only=True))
    # More than a step of the inner dimension, in one part of it or the other.
    samples += [
        call(shape, steps, values_only=True, gradcheck=False)
        for shape in ((2, 520, 3), (14, 3, 515), (2, 1030, 520))
    ]
    return samples


def many_rows() -> list[Sample]:
    """Products by tile registers, in one block of rows and in two, and special values in them."""
    shapes = ((130, 33, 65), (300, 70, 100), (257, 0, 48))
    samples = [call(shape, values_only=True, gradcheck=False) for shape in shapes]
    return samples + with_special_values(shape=(130, 20, 33))


def with_special_values(steps: int | None = None, shape: Shape = (9, 20, 33)) -> list[Sample]:
    """One in an input, a state, a cell or the bias."""
    samples = []
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, 1e-300, 30.0, -30.0):
        # Large ones shut gates and fill cells; in a product they would only cost digits.
        for position in (2, 4) if abs(value) == 30 else (0, 3, 4):
            arguments = tensors(shape, steps)
            arguments[position].view(-1)[27] = value
            # A state that is infinite, or a gate, has derivatives of zero times infinity.
            finite = abs(value) < torch.inf
            samples.append(
                Sample(
                    arguments,
                    name=f"{value} in {position} of {shape}",
                    values_only=True,
                    differentiable=finite,
                    gradcheck=False,
                )
            )
    return samples


def wrong_calls(op: str, steps: int | None = None) -> list[ErrorSample]:
    input, weights, bias, old_h, old_cell = (t.float() for t in tensors((2, 3, 4), steps))
    rank = r"two dimensions, \(batch, input_features\)"
    if op != "lltm":
        rank = r"three, \(steps, batch, input_features\)"

    def wrong(match: str, **changed: Tensor) -> ErrorSample:
        given = {
            "input": input,
            "weights": weights,
            "bias": bias,
            "old_h": old_h,
            "old_cell": old_cell,
        }
        return ErrorSample(tuple((given | changed).values()), match=match)

    return [
        wrong(rank, input=input[0] if op == "lltm" else input[0, 0]),
        wrong(rank, input=input.unsqueeze(0)),
        wrong(r"input is torch.int32; supported", input=input.int()),
        wrong(r"weights is torch.complex64; supported", weights=weights.cfloat()),
        wrong(r"weights is torch.float64 but input is torch.float32", weights=weights.double()),
        wrong(r"weights has shape \(7, 12\) but must have shape \(12, 7\)", weights=weights.mT),
        wrong(r"weights has shape \(12, 6\) but must have", weights=weights[:, 1:]),
        wrong(r"weights has shape \(84,\) but must have", weights=weights.flatten()),
        wrong(r"bias has shape \(11,\) but must have shape \(12,\) or \(1, 12\)", bias=bias[0, 1:]),
        wrong(r"bias has shape \(12, 1\) but must have", bias=bias.mT),
        wrong(r"bias has shape \(\) but must have", bias=bias.sum()),
        wrong(r"bias is torch.float16 but input is torch.float32", bias=bias.half()),
        wrong(r"old_h has shape \(4,\) but must have two dimensions", old_h=old_h[0]),
        wrong(r"old_h has shape \(1, 4\) but must have shape \(2, 4\)", old_h=old_h[:1]),
        wrong(r"weights has shape \(12, 7\) but must have shape \(9, 6\)", old_h=old_h[:, 1:]),
        wrong(r"old_h is torch.bfloat16 but", old_h=old_h.bfloat16()),
        wrong(
            r"old_cell has shape \(2, 3\) but must have shape \(2, 4\)", old_cell=old_cell[:, 1:]
        ),
        wrong(r"old_cell has shape \(4,\) but must", old_cell=old_cell[0]),
        wrong(r"old_cell is torch.float64 but", old_cell=old_cell.double()),
    ]
