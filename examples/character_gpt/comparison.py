"""Do two sets of operators train alike? Three claims, each with a tolerance that is derived.

Two correct programs round differently, and training amplifies the difference from step to step, so
the two loss curves cannot agree digit by digit to the end. What can be claimed is this:

* From equal weights, the losses of the tokens and the gradient are as near to those in float64 as
  PyTorch's are: at most twice as far. Tested on the first weights and again on the trained ones.
* At the end, the two mean losses differ by less than twice the standard error of a mean loss: by
  less than drawing other batches would have changed either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from .model import GPT, Operators, pytorch_operators
from .training import Training, autocast

LEAST_WINDOW = 10  # fewer losses do not tell how much a batch's loss varies


@dataclass(frozen=True)
class Claim:
    """Something that was measured, and how large it may be."""

    words: str
    measured: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """False too where either figure is not a number."""
        return self.measured <= self.tolerance


def with_operators(model: GPT, operators: Operators, dtype: torch.dtype | None = None) -> GPT:
    """A copy of a model that computes with other operators, its weights in another dtype."""
    twin = GPT(operators, model.config)
    twin.load_state_dict(model.state_dict())
    return twin.to(next(model.parameters()).device, dtype)


def _losses_and_gradient(model: GPT, dtype: torch.dtype, batch: Tensor) -> tuple[Tensor, Tensor]:
    device = model.characters.device
    with autocast(device, dtype):
        losses = model.token_losses(batch.to(device))
    gradient = torch.autograd.grad(losses.mean(), list(model.parameters()))
    return losses.detach().double(), torch.cat([part.flatten().double() for part in gradient])


def compare_step(ours: Training, theirs: Training, batch: Tensor, when: str) -> list[Claim]:
    """How far one step with either operators is from float64, on the weights of `ours`.

    Args:
        ours: the run under test.
        theirs: the run that sets the tolerance.
        batch: int64 (batch, context + 1).
        when: the moment, for the words of the claims.
    """
    exact_model = with_operators(ours.model, pytorch_operators(), torch.float64)
    exact = _losses_and_gradient(exact_model, torch.float64, batch)
    results = [
        _losses_and_gradient(with_operators(ours.model, run.model.operators), run.dtype, batch)
        for run in (ours, theirs)
    ]
    claims = []
    for index, quantity in enumerate(("losses", "gradient")):
        ours_error, theirs_error = (
            ((result[index] - exact[index]).norm() / exact[index].norm()).item()
            for result in results
        )
        words = f"{when}: error of the {quantity}, relative"
        claims.append(Claim(words, ours_error, 2 * theirs_error))
    return claims


def compare_ends(ours: Sequence[float], theirs: Sequence[float]) -> list[Claim]:
    """Compare the mean losses at the end of two runs on the same batches.

    The window is the last quarter; a run shorter than the least window makes no claim.
    """
    window = max(LEAST_WINDOW, len(ours) // 4)
    if len(ours) < window:
        return []
    ours, theirs = ours[-window:], theirs[-window:]
    standard_error = stdev(theirs) / window**0.5
    words = f"trained: losses of the last {window} steps, difference"
    return [Claim(words, abs(fmean(ours) - fmean(theirs)), 2 * standard_error)]
