"""How far the results of a tiled attention in limited precision may be from the exact ones.

A first-order rounding error analysis (Higham, Accuracy and Stability of Numerical Algorithms,
chapter 3) of the algorithm that csrc/cuda states, for any order of its sums: a sum of n products
is off by at most n units of roundoff of the sum of their magnitudes, a product or an exponential
by a few. Nothing in it is measured, and nothing was chosen so that a test passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
SECOND_ORDER = 1.05  # what products of errors add, while the errors are small


@dataclass(frozen=True)
class Problem:
    """Attention in float64 over a broadcast batch; ``factors`` are those of dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor  # added to the scores, minus infinity where a key takes no part
    factors: Tensor
    scale: float
    accumulator: torch.dtype
    result: torch.dtype
    softcap: float = 0.0


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=0, posinf=0, neginf=0)


class Bounds:
    """Bounds on the errors of the results, each of the shape of the whole batch.

    Attributes:
        output: the output.
        log_sum_exp: the logarithm of the sum of exponentials.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        unit = unit_roundoff(problem.accumulator)
        self.unit = unit
        query, key, value = problem.query, problem.key, problem.value
        columns, tiles = key.shape[-2], -(-key.shape[-2] // TILE)

        scores = query @ key.mT * problem.scale
        share = (
            torch.tanh(scores / problem.softcap) if problem.softcap else torch.zeros_like(scores)
        )
        scores = (share * problem.softcap if problem.softcap else scores) + problem.mask
        self.log_sum_exp_exact = scores.logsumexp(-1, keepdim=True)
        self.weights = torch.exp(scores - finite(self.log_sum_exp_exact))
        magnitude = finite(scores.abs())
        largest = magnitude.amax(-1, keepdim=True)

        products = abs(problem.scale) * (query.abs() @ key.abs().mT)
        score_error = (query.shape[-1] + 2) * unit * products
        # A cap is nowhere steeper than 1; its tanh is off by 2 units in the last place (CUDA C++
        # Programming Guide, mathematical functions), the quotient before it and the product
        # behind it by half a unit each.
        self.cap_slope = 1 - share * share
        self.cap_slope_error = torch.zeros_like(scores)
        if problem.softcap:
            share_error = score_error / problem.softcap + 6 * unit * share.abs()
            score_error = score_error + 8 * unit * problem.softcap * share.abs()
            # Of (1 - share) (1 + share).
            self.cap_slope_error = 2 * share_error + share_error**2 + 4 * unit * self.cap_slope
        score_error = score_error + 2 * unit * (finite(problem.mask.abs()) + magnitude + largest)
        score_error = score_error * (self.weights > 0)
        row_error = score_error.amax(-1, keepdim=True)
        # The sum over the columns, rescaled once a tile.
        sum_error = row_error + unit * (columns + 8 + 8 * tiles + 2 * tiles * largest)
        log_sum_exp_error = sum_error + 2 * unit * (largest + finite(self.log_sum_exp_exact).abs())

        dropped = self.weights * problem.factors
        relative = score_error + sum_error + unit * (columns + 2 * tiles + 8)
        self.output_exact = dropped @ value
        self.output_error = (dropped * relative) @ value.abs()
        if self.is_half:
            # The tensor cores take weights of the operands' type, relative to the largest.
            rounding = self.rounding(dropped, problem.factors)
            self.output_error = self.output_error + rounding @ value.abs()
        self.output = self.rounded(self.output_error, self.output_exact)
        self.log_sum_exp = (log_sum_exp_error * SECOND_ORDER).squeeze(-1)
        self.log_sum_exp = self.log_sum_exp * self.reference_factor
        # In the backward pass a weight is the exponential of score minus log-sum-exp.
        difference = magnitude + finite(self.log_sum_exp_exact).abs()
        # That of the tensor cores' kernels is a power of two, of the difference times a rounded
        # constant (cuda/device/fast_math.cuh).
        own = 3 * difference + 8 if self.is_half else 2 * difference + 4
        self.weight_error = score_error + log_sum_exp_error + unit * own

    @property
    def is_half(self) -> bool:
        return self.problem.result.itemsize == 2

    def rounding(self, values: Tensor, smallest: Tensor | float = 1.0) -> Tensor:
        """The error of values that are rounded to the operands' type, in units of ``smallest``."""
        info = torch.finfo(self.problem.result)
        least = info.smallest_normal * info.eps
        return unit_roundoff(self.problem.result) * values.abs() + least * smallest

    @property
    def reference_factor(self) -> int:
        """The exact results are computed in float64, with errors of their own."""
        return 2 if self.problem.accumulator == torch.float64 else 1

    def rounded(self, error: Tensor, exact: Tensor) -> Tensor:
        """The error after the result is rounded to its dtype."""
        dtype = self.problem.result
        error = SECOND_ORDER * (error + unit_roundoff(dtype) * (exact.abs() + error))
        return error * self.reference_factor + torch.finfo(dtype).smallest_normal

    def stored_error(self, exact: Tensor) -> Tensor:
        """What is lost of the output between the passes: half precision keeps it in two parts."""
        unit = unit_roundoff(self.problem.result)
        if self.problem.result.itemsize > 2:
            return unit * exact.abs()
        info = torch.finfo(self.problem.result)
        return SECOND_ORDER * unit**2 * exact.abs() + info.smallest_normal * info.eps

    def sum_error(self, error: Tensor, magnitude: Tensor, terms: int, like: Tensor) -> Tensor:
        """The error of the sum over the batch dimensions along which ``like`` is broadcast."""
        shared = magnitude.numel() // max(like.numel(), 1)
        total = error.sum_to_size(like.shape)
        return total + self.unit * (terms * shared + 4) * magnitude.sum_to_size(like.shape)

    def gradients(self, grad_output: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Bounds for the gradients of query, key, value and, where it is given, the mask."""
        problem, unit, weights = self.problem, self.unit, self.weights
        query, key, value, factors = problem.query, problem.key, problem.value, problem.factors
        scale = abs(problem.scale)
        rows, columns, value_size = query.shape[-2], key.shape[-2], value.shape[-1]

        grad_weights = grad_output @ value.mT * factors
        grad_weights_error = (value_size + 3) * unit * (grad_output.abs() @ value.abs().mT)
        delta_terms = (grad_output * self.output_exact).abs().sum(-1, keepdim=True)
        delta = (grad_output * self.output_exact).sum(-1, keepdim=True)
        stored = self.output_error + self.stored_error(self.output_exact)
        delta_error = (value_size + 2) * unit * delta_terms
        delta_error = delta_error + (grad_output.abs() * stored).sum(-1, keepdim=True)

        grad_scores = (weights * (grad_weights - delta)).abs()
        grad_scores_error = weights * (
            (self.weight_error + 6 * unit) * (grad_weights.abs() + delta.abs())
            + factors * grad_weights_error
            + delta_error
        )
        dropped = weights * factors

        before_cap = grad_scores * self.cap_slope
        before_cap_error = grad_scores_error * (self.cap_slope + self.cap_slope_error)
        before_cap_error = before_cap_error + grad_scores * self.cap_slope_error
        dropped_error = dropped * self.weight_error
        if self.is_half:
            # Operands of the tensor cores, as the weights forward.
            before_cap_error = before_cap_error + self.rounding(before_cap + before_cap_error)
            dropped_error = dropped_error + self.rounding(dropped + dropped_error)

        def product(error: Tensor, left: Tensor, right: Tensor, terms: int, like: Tensor) -> Tensor:
            magnitude = left @ right.abs()
            return self.sum_error(error @ right.abs(), magnitude, terms, like)

        query_error = scale * product(before_cap_error, before_cap, key, columns, query)
        key_error = scale * product(before_cap_error.mT, before_cap.mT, query, rows, key)
        value_error = product(dropped_error.mT, dropped.mT, grad_output, rows, value)
        errors = [query_error, key_error, value_error]
        if mask is not None:
            errors.append(self.sum_error(grad_scores_error, grad_scores, 1, mask))
        return errors
