"""One run of training: a model, its optimiser, and the record of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .model import GPT


@dataclass(frozen=True)
class Schedule:
    """Learning rate of a step: a linear rise, then the inverse square root of the step.

    It knows nothing of the length of the run, so that a run can be stopped and resumed anywhere.
    """

    peak: float
    warm_up: int = 50

    def rate(self, step: int) -> float:
        """The learning rate of the step, which counts from 0."""
        return self.peak * min((step + 1) / self.warm_up, (self.warm_up / (step + 1)) ** 0.5)


class Training:
    """A model in training.

    Args:
        model: on the device that it is to be trained on, in float32.
        schedule: of the learning rate.
        dtype: what the operators compute in; below float32 by autocast, the weights stay.
        step: how many steps the model has been trained before.
    """

    def __init__(
        self, model: GPT, schedule: Schedule, dtype: torch.dtype = torch.float32, step: int = 0
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.dtype = dtype
        self.device = next(model.parameters()).device
        self.step = step
        self.optimizer = torch.optim.AdamW(
            model.parameters(), schedule.peak, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    @property
    def name(self) -> str:
        """The name of the operators."""
        return self.model.operators.name

    def autocast(self) -> AbstractContextManager[object]:
        """The context to compute in."""
        return autocast(self.device, self.dtype)

    def advance(self, batch: Tensor) -> None:
        """One step on a batch, int64 (batch, context + 1), recorded in `losses` and `seconds`."""
        start = synchronized_clock(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        with self.autocast():
            loss = self.model.token_losses(batch.to(self.device)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.losses.append(loss.item())
        self.seconds.append(synchronized_clock(self.device) - start)

    @torch.no_grad()
    def validation_loss(self, batches: list[Tensor]) -> float:
        """Mean loss of a character, in nats."""
        with self.autocast():
            losses = [self.model.token_losses(batch.to(self.device)) for batch in batches]
        return torch.cat(losses).mean().item()

    def tokens_per_second(self, tokens_per_step: int, warm_up: int) -> float:
        """By the median step, the first `warm_up` ones left out where there are others."""
        return tokens_per_step / median(self.seconds[warm_up:] or self.seconds)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The context in which operators compute in `dtype`, where the weights have more bits."""
    return torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16))


def synchronized_clock(device: torch.device) -> float:
    """Seconds on a steady clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def alternating(count: int, steps: int, block: int) -> Iterator[list[int]]:
    """The order in which `count` runs take their steps, a block of steps each in turn.

    What disturbs the machine then disturbs them all alike; the first of a round is the last of the
    next, so that none has always the caches that another one left.

    Yields:
        A round: the number of the run for each step to take, all runs equally often.
    """
    order = list(range(count))
    for start in range(0, steps, block):
        yield [run for run in order for _ in range(min(block, steps - start))]
        order.reverse()
