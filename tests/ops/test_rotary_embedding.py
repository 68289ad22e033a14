from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, SPECIAL, around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample

# Where a row of pairs ends: around registers of each width, in both types of the computation.
HALVES = around(2, 4, 8, 16, 32)


def tables(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Cosines and sines of any angles."""
    angles = 4 * normal(*shape, seed=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def special_pairs() -> Tensor:
    """Rows in which each special value is turned together with an ordinary one."""
    values = torch.tensor(SPECIAL, dtype=torch.float64)
    return torch.stack([values, values, torch.ones_like(values), torch.ones_like(values)], -1)


def calls(make: Callable[..., Sample]) -> list[Sample]:
    """Samples of the operator, or of its gradient, whose arguments are alike."""

    def sample(shape: tuple[int, ...], table: tuple[int, ...], pairs: bool, **options: object):
        cos, sin = tables(*table)
        return make(normal(*shape), cos, sin, pairs, **options)

    samples = []
    for pairs in (False, True):
        narrow = tables(5, 3, dtype=torch.float32)
        cos, sin = tables(len(SPECIAL), 2)
        samples += [
            sample((2, 3, 5, 8), (5, 4), pairs, family=f"heads {pairs}"),
            sample((3, 4, 7, 12), (7, 6), pairs, family=f"heads {pairs}"),
            sample((2, 3, 5, 9), (2, 1, 5, 3), pairs, name="own positions"),
            make(normal(3, 5, 6), *narrow, pairs, name="tables in float32"),
            # Longer than a thread's share, in rows that share none of their tables.
            sample((2, 700, 48), (2, 700, 24), pairs, values_only=True),
            make(special_pairs(), cos, sin, pairs, name="special", values_only=True),
            *(
                sample((2, 3, 2 * half + rest), (3, half), pairs, values_only=True)
                for half in HALVES
                for rest in (0, 3)
            ),
        ]
    return [
        *samples,
        sample((4, 2, 6), (4, 1, 3), False, name="heads inside"),
        sample((6,), (2,), False, name="one row"),
        sample((3, 4), (3, 0), True, name="nothing turned"),
        sample((0, 5, 4), (5, 2), False),
        sample((2, 0, 4), (0, 2), True),
        sample((2, 3, 0), (3, 0), False),
    ]


def wrong_calls(name: str, *more: bool) -> list[ErrorSample]:
    x, table = torch.ones(2, 3, 6), torch.ones(3, 2)

    def wrong(input: Tensor, cos: Tensor, sin: Tensor, match: str) -> ErrorSample:
        return ErrorSample((input, cos, sin, *more), match=match)

    return [
        wrong(x.int(), table, table, f"{name} is torch.int32; supported are"),
        wrong(x, table.int(), table, "cos is torch.int32; supported are"),
        wrong(x, table, table.bool(), "sin is torch.bool; supported are"),
        wrong(x, table.double(), table, f"cos is torch.float64 but {name} is torch.float32"),
        wrong(x.half(), table.bfloat16(), table, f"cos is torch.bfloat16 but {name} is torch.f"),
        wrong(x.half(), table, table.half(), "sin is torch.float16 but cos is torch.float32"),
        wrong(x[0, 0, 0], table, table, f"{name} has no dimensions; it needs at least one"),
        wrong(x, table[0, 0], table, "cos has no dimensions; it needs at least one"),
        wrong(x, table, table[:2], r"sin has shape \(2, 2\) but cos has shape \(3, 2\)"),
        wrong(x, table.repeat(1, 2), table.repeat(1, 2), f"turn 8 elements; a row of {name} has 6"),
        wrong(x, table[:2], table[:2], r"cos of shape \(2, 2\) does not broadcast to the rows of"),
        wrong(x[0], *[table[None]] * 2, r"cos of shape \(1, 3, 2\) does not broadcast"),
    ]


class TestRotaryEmbedding(OperatorTests):
    op = torch.ops.pkg.rotary_embedding.default
    reference = staticmethod(references.rotary_embedding)
    function = staticmethod(pkg.ops.rotary_embedding)
    one_of = MappingProxyType({"gradients": 3})

    def samples(self) -> list[Sample]:
        def make(input: Tensor, cos: Tensor, sin: Tensor, pairs: bool, **options: object):
            return Sample((input, cos, sin), {"interleaved": True} if pairs else {}, **options)

        return calls(make)

    def errors(self) -> list[ErrorSample]:
        return wrong_calls("input")

    @pytest.mark.parametrize("pairs", [False, True])
    @pytest.mark.parametrize("dtype", FLOATING)
    def test_a_quarter_turn_is_exact(
        self, device: torch.device, dtype: torch.dtype, pairs: bool
    ) -> None:
        x = normal(3, 5, 40).to(device, dtype)
        sin = torch.ones(5, 20, device=device)
        turned = pkg.ops.rotary_embedding(x, 1 - sin, sin, interleaved=pairs)
        if pairs:
            expected = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        else:
            expected = torch.cat([-x[..., 20:], x[..., :20]], -1)
        assert torch.equal(turned, expected)

    @pytest.mark.parametrize("pairs", [False, True])
    def test_turning_back_gives_what_was_turned(self, device: torch.device, pairs: bool) -> None:
        x = normal(2, 3, 7, 34).to(device)
        cos, sin = (each.to(device) for each in tables(7, 15))
        turned = pkg.ops.rotary_embedding(x, cos, sin, interleaved=pairs)
        back = pkg.ops.rotary_embedding(turned, cos, -sin, interleaved=pairs)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-14)

    def test_the_result_lies_in_memory_as_the_input_does(self, device: torch.device) -> None:
        cos, sin = (each.to(device) for each in tables(5, 4))
        projection = normal(2, 5, 3, 3, 8).to(device).requires_grad_()
        query = projection[:, :, 0].transpose(1, 2)  # (batch, heads, tokens, head size)
        turned = pkg.ops.rotary_embedding(query, cos, sin)
        assert turned.transpose(1, 2).is_contiguous()
        assert turned.stride() == torch.empty_like(query).stride()

    def test_only_tables_that_want_a_gradient_keep_the_input(self, device: torch.device) -> None:
        x = normal(3, 5, 8).to(device).requires_grad_()
        cos, sin = (each.to(device) for each in tables(5, 4))
        kept: list[Tensor] = []
        for table in (cos, cos.clone().requires_grad_()):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
            ):
                pkg.ops.rotary_embedding(x, table, sin).sum().backward()
        assert [tensor.shape for tensor in kept] == [cos.shape] * 4 + [x.shape]


class TestRotaryEmbeddingBackward(OperatorTests):
    op = torch.ops.pkg.rotary_embedding_backward.default
    reference = staticmethod(references.rotary_embedding_backward)
    one_of = MappingProxyType({"gradients": 3})

    def samples(self) -> list[Sample]:
        def make(grad: Tensor, cos: Tensor, sin: Tensor, pairs: bool, **options: object):
            return Sample((grad, cos, sin, pairs), **options)

        return calls(make)

    def errors(self) -> list[ErrorSample]:
        return wrong_calls("grad", False)
