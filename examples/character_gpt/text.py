"""Text to learn from: where it comes from, and its characters as numbers."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextError(Exception):
    """The text cannot be learned from; the message says why."""


def standard_library() -> str:
    """The sources of Python's own top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
    if not sources:
        raise TextError(f"this Python has no sources in {folder}; give a text with --text FILE")
    return "\n".join(sources)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        TextError: when there is no such file, or it is not text.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text: byte {error.start} is wrong") from None


class Vocabulary:
    """The characters that a model knows, in the order of their numbers.

    A character that it does not know is read as U+FFFD, which every vocabulary holds.

    Args:
        characters: all different, in the order of their code points.
    """

    def __init__(self, characters: str) -> None:
        if list(characters) != sorted({*characters, UNKNOWN}):
            raise ValueError("the vocabulary is not an ordered set of characters with U+FFFD")
        self.characters = characters
        self._codes = _code_points(characters)
        self._unknown = characters.index(UNKNOWN)

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """The vocabulary of all characters of a text."""
        return cls("".join(sorted({*text, UNKNOWN})))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The numbers of the characters, int64 (len(text),)."""
        codes = _code_points(text)
        numbers = np.searchsorted(self._codes, codes).clip(max=len(self) - 1)
        numbers[self._codes[numbers] != codes] = self._unknown
        return torch.from_numpy(numbers.astype(np.int64))

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters of the numbers."""
        return "".join(self.characters[token] for token in tokens)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


class Corpus:
    """A text in numbers: its last tenth validates, the rest trains.

    A batch depends on the seed and on the step alone, so a resumed run reads what an
    uninterrupted one would have read.

    Args:
        text: at least 20 * (context + 1) characters.
        vocabulary: of the model.
        context: the length of the model's input.
        batch: sequences in a batch.
        seed: of the draw of the batches.

    Attributes:
        characters: of the text.
        tokens_per_step: that a batch teaches to predict.
    """

    def __init__(
        self, text: str, vocabulary: Vocabulary, context: int, batch: int, seed: int
    ) -> None:
        least = 20 * (context + 1)
        if len(text) < least:
            raise TextError(f"the text has {len(text)} characters; at least {least} are needed")
        tokens = vocabulary.encode(text)
        split = len(tokens) * 9 // 10
        self.characters = len(text)
        self.tokens_per_step = batch * context
        self._training, self._validation = tokens[:split], tokens[split:]
        self._length = context + 1
        self._batch = batch
        self._seed = seed

    def training_batch(self, step: int) -> Tensor:
        """The batch of a step, int64 (batch, context + 1)."""
        draw = np.random.default_rng((self._seed, step))
        last = len(self._training) - self._length
        starts = torch.from_numpy(draw.integers(0, last, self._batch, endpoint=True))
        return self._training[starts[:, None] + torch.arange(self._length)]

    def validation_batches(self, most: int) -> list[Tensor]:
        """At most so many batches, the same ones at each call, spread over the held-out text."""
        last = len(self._validation) - self._length
        count = min(most * self._batch, last // self._length + 1)
        starts = torch.linspace(0, last, count).long()
        chosen = self._validation.unfold(0, self._length, 1)[starts]
        return [chosen[i : i + self._batch] for i in range(0, count, self._batch)]
