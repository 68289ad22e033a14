"""Text out of a model, one character at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import GPT


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.float().cpu() / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.inference_mode()
def generate(model: GPT, prompt: Tensor, count: int, temperature: float, seed: int) -> list[int]:
    """Continue a prompt.

    Keys and values are kept, so a new character costs one token's work; when the context is full,
    its later half is read anew.

    Args:
        model: what to continue it with.
        prompt: int64 (characters,), at least one; the model sees the last half context of it.
        count: how many characters to write.
        temperature: 1 draws from the model's distribution, less is bolder, 0 takes the likeliest.
        seed: of the draw.

    Returns:
        The numbers of the new characters.
    """
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    device = model.characters.device
    tokens = prompt.tolist()
    caches = model.new_caches()
    unread = tokens[-max(1, context // 2) :]
    for _ in range(count):
        if caches[0].length + len(unread) > context:
            caches = model.new_caches()
            unread = tokens[-max(1, context // 2) :]
        logits = model(torch.tensor([unread], device=device), caches)[0, -1]
        tokens.append(_draw(logits, temperature, generator))
        unread = tokens[-1:]
    return tokens[-count:] if count else []
