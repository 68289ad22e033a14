"""The trained model with weights of four bits: what that costs, and how fast it writes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .comparison import Claim, with_operators
from .generation import generate
from .model import GPT, Linear
from .training import Training, alternating, synchronized_clock

LARGEST_LOSS = 0.05
"""Nats a character that the rounding of the weights may cost, at the most."""


@dataclass(frozen=True)
class Quantised:
    """Figures of a model and of the same with weights of four bits."""

    group_size: int
    loss: float
    quantised_loss: float
    tokens_per_second: float | None
    quantised_tokens_per_second: float | None

    @property
    def claim(self) -> Claim:
        """That the likelihood suffers little."""
        words = f"weights of 4 bits, groups of {self.group_size}: loss of likelihood, nats"
        return Claim(words, self.quantised_loss - self.loss, LARGEST_LOSS)

    def __str__(self) -> str:
        text = f"4 bits, groups of {self.group_size}: validation loss {self.quantised_loss:.4f}"
        text += f" ({self.loss:.4f} in full)"
        if self.tokens_per_second and self.quantised_tokens_per_second:
            ratio = self.quantised_tokens_per_second / self.tokens_per_second
            text += f", generating {self.quantised_tokens_per_second:,.0f} tokens per second"
            text += f" ({ratio:.2f} times {self.tokens_per_second:,.0f})"
        return text


def quantised(model: GPT, group_size: int) -> GPT:
    """A copy whose linear layers have weights of four bits; the embedding stays as it is."""
    from pkg import quantize_

    twin = with_operators(model, model.operators)
    quantize_(twin, group_size, lambda module, name: isinstance(module, Linear))
    return twin


@torch.no_grad()
def measure(
    training: Training,
    batches: list[Tensor],
    prompt: Tensor,
    group_size: int,
    characters: int,
    rounds: int = 3,
) -> Quantised:
    """Compare a trained model with its quantised copy, on the same text, in turn."""
    models = [training.model, quantised(training.model, group_size)]
    losses = []
    seconds: list[list[float]] = [[], []]
    with training.autocast():
        for model in models:
            parts = [model.token_losses(batch.to(training.device)) for batch in batches]
            losses.append(torch.cat(parts).mean().item())
        for round_ in alternating(2, rounds if characters else 0, 1):
            for index in round_:
                start = synchronized_clock(training.device)
                generate(models[index], prompt, characters, 0.7, 0)
                seconds[index].append(synchronized_clock(training.device) - start)
    speeds = [characters / median(each) if each else None for each in seconds]
    return Quantised(group_size, *losses, *speeds)
