"""Dropout masks by the definition of csrc/host/philox.h, in NumPy."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # of 32 bits each, so that products do not overflow

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox_4x32_7(counter: list[Words], key: tuple[int, int]) -> list[Words]:
    """Philox4x32-7 (Salmon et al., SC 2011) of many counters.

    Example, the known answer of the authors' Random123:
        >>> ones = np.full(1, 0xFFFFFFFF, np.uint64)
        >>> [f"{int(word[0]):08x}" for word in philox_4x32_7([ones] * 4, (2**32 - 1, 2**32 - 1))]
        ['5207ddc2', '45165e59', '4d8ee751', '8c52f662']
    """
    for _ in range(7):
        first = counter[0] * np.uint64(0xD2511F53)
        second = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> HALF) ^ counter[1] ^ np.uint64(key[0]),
            second & LOW,
            (first >> HALF) ^ counter[3] ^ np.uint64(key[1]),
            first & LOW,
        ]
        key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
    return counter


def kept(seed: int, batch: int, rows: int, columns: int, dropout: float) -> torch.Tensor:
    """Which elements dropout keeps, of shape (batch, rows, columns)."""
    b, i, j = np.indices((batch, rows, columns), dtype=np.uint64)
    words = philox_4x32_7(
        [(j // 4) & LOW, i & LOW, b & LOW, b >> HALF], (seed % 2**32, seed % 2**64 >> 32)
    )
    word = np.choose((j % 4).astype(np.int64), words) if j.size else j
    return torch.from_numpy(word >= np.uint64(math.floor(dropout * 2**32)))
