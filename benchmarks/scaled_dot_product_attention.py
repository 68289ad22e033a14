"""Attention: forward, forward and backward, and decoding against a key and value cache.

The whole grid has every length from 16 up, causal too, one head, and each kind of input that
PyTorch hands to a slower path: those are compared with the plain case of the same dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ._attention import WINDOW, Recipe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (16, 64, 128, 256, 1024, 4096, 16384)
LONGEST_WITH_BACKWARD = 4096
SIZES = (64, 128)
CACHES = (128, 1024, 4096, 16384)
HEAD_SIZES = (8, 33, 40, 80, 96, 160, 256, 512)
WINDOW_LENGTH = 4096


def _common() -> Iterator[Recipe]:
    for dtype in DTYPES:
        plain = Recipe(dtype)
        yield plain
        yield replace(plain, causal=True)
        yield replace(plain, backward=True)
        yield replace(plain, rows=1, columns=4096, batch=8)
    for dtype in DTYPES[:2]:
        yield Recipe(dtype, rows=64)
        yield Recipe(dtype, mask="boolean mask")
    yield Recipe(torch.float32, dropout=True, backward=True)
    yield Recipe(torch.bfloat16, key_heads=2)


def _every_length(dtype: torch.dtype) -> Iterator[Recipe]:
    for heads, size in ((8, SIZES[0]), (8, SIZES[1]), (1, SIZES[0])):
        for length in LENGTHS:
            plain = Recipe(dtype, length, heads=heads, size=size)
            for backward in (False, True):
                if not backward or length <= LONGEST_WITH_BACKWARD:
                    yield replace(plain, backward=backward)
                    yield replace(plain, backward=backward, causal=True)


def _every_cache(dtype: torch.dtype) -> Iterator[Recipe]:
    for size in SIZES:
        for keys in CACHES:
            yield Recipe(dtype, 1, keys, size=size)
    yield Recipe(dtype, 1, 4096, heads=32, key_heads=8, size=128)


def _every_kind(dtype: torch.dtype) -> Iterator[Recipe]:
    plain = Recipe(dtype)
    for mask in (
        "boolean mask",
        "boolean mask of every head",
        "boolean mask for all heads",
        "boolean mask of the keys",
        "float mask",
        "ALiBi",
    ):
        yield replace(plain, mask=mask)
    yield replace(plain, mask="boolean mask", backward=True)
    yield replace(plain, mask="learnable float mask", backward=True)
    for backward in (False, True):
        window = Recipe(dtype, WINDOW_LENGTH, mask=f"window of {WINDOW}", backward=backward)
        yield window
        for key_heads in (2, 1):
            yield replace(plain, key_heads=key_heads, backward=backward)
        yield replace(plain, rows=256, columns=2048, backward=backward)
        yield replace(plain, dropout=True, backward=backward)
        yield replace(plain, heads_inside=True, backward=backward)
    for value_size in (32, 128):
        yield replace(plain, value_size=value_size)
    for size in HEAD_SIZES:
        yield replace(plain, size=size)


def _all() -> Iterator[Recipe]:
    for dtype in DTYPES:
        yield from _every_length(dtype)
        yield from _every_cache(dtype)
        yield from _every_kind(dtype)


def recipes(full: bool) -> Iterator[Recipe]:
    """A few of every kind, and the rest of the grid."""
    common = list(_common())
    yield from common
    if full:
        yield from (recipe for recipe in _all() if recipe not in common)


def gpu_recipes() -> Iterator[Recipe]:
    """Batches of long sequences: each pass of both dtypes, then each kind once in bfloat16."""
    for dtype in DTYPES[1:]:
        for heads, size in ((32, 64), (16, 128)):
            for causal in (False, True):
                for backward in (False, True):
                    plain = Recipe(dtype, 4096, batch=4, heads=heads, size=size)
                    yield replace(plain, causal=causal, backward=backward)
    wide = Recipe(torch.bfloat16, 4096, batch=4, heads=16, size=128)
    for backward in (False, True):
        yield Recipe(torch.float32, 4096, batch=2, heads=16, size=64, backward=backward)
        yield replace(wide, key_heads=4, causal=True, backward=backward)
        yield replace(wide, heads=8, size=256, backward=backward)
        yield replace(wide, heads_inside=True, backward=backward)
    yield replace(wide, batch=1, rows=16384, causal=True)
    yield replace(wide, rows=1, columns=8192, batch=16, heads=32, key_heads=8)
