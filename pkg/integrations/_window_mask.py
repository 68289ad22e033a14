"""Masks of transformers that are nothing but causality and a sliding window, known as such.

Such a mask is a mask like any other, of booleans, and besides it is known by itself what it says:
attention that gets the tensor as it was made skips the keys out of the window by
``window_left`` and does not read it. A tensor that was made of it on the way, a part, a copy or a
sum, is not known, and neither is one that was written to; what it holds then counts.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_pkg_window"


@dataclass(frozen=True)
class Window:
    """What such a mask says.

    Attributes:
        queries: how many there are.
        keys: how many there are, those included that no query sees.
        begin: the first key that any query sees.
        end: behind the last query's own key. The query before it has the key before it.
        left: how many keys before its own a query sees.
    """

    queries: int
    keys: int
    begin: int
    end: int
    left: int


def with_windows(sdpa_mask: Callable[..., Any], windowed: Callable[[int], Any]) -> Any:
    """A function of masks that makes windows known.

    Args:
        sdpa_mask: that of transformers, which makes all other masks.
        windowed: transformers' ``sliding_window_causal_mask_function``, which makes the rule of a
            window of that size.

    Returns:
        A function with the arguments and results of ``sdpa_mask``.
    """

    def mask(*arguments: Any, **options: Any) -> Any:
        window = None if arguments or _is_traced() else _window(windowed, **options)
        if window is None:
            return sdpa_mask(*arguments, **options)
        places = options.get("cache_position")  # before transformers 5
        device = options.get("device", "cpu") if places is None else places.device
        return _mask_of(window, options["batch_size"], device)

    return mask


def window_of(mask: Tensor | None, queries: int, keys: int) -> Window | None:
    """What is known of a mask for so many queries and keys; None where nothing is."""
    if mask is None or _is_traced():
        return None
    window, made, version = getattr(mask, _ATTRIBUTE, (None, 0, 0))
    if window is None or made != id(mask) or version != mask._version:
        return None
    if (window.queries, window.keys) != (queries, keys):
        return None
    assert isinstance(window, Window)
    return window


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def _window(
    windowed: Callable[[int], Any],
    *,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: Any,
) -> Window | None:
    """The window that is all that a mask would say; None where there is more, or doubt."""
    # With fewer keys than that transformers needs no mask.
    if local_size is None or kv_length < local_size:
        return None
    if not _are_alike(mask_function, windowed(local_size)):
        return None
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[:1]
        if not cache_position.diff().eq(1).all():
            return None
    if isinstance(q_offset, Tensor):
        if q_offset.numel() != 1:
            return None
        q_offset = int(q_offset)
    if q_length is None:
        return None
    own = q_offset - kv_offset  # the key of the first query
    begin, end = max(0, own - local_size + 1), own + q_length
    if own < 0 or end > kv_length:
        return None
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset + begin : kv_offset + end]
        if attention_mask.dim() != 2 or seen.shape[1] != end - begin or not seen.all():
            return None
    return Window(q_length, kv_length, begin, end, local_size - 1)


def _mask_of(window: Window, batch: int, device: torch.device | str) -> Tensor:
    own = window.end - window.queries
    with torch.inference_mode(False):  # or it would have no version to know it by
        mask = torch.ones(window.queries, window.keys, dtype=torch.bool, device=device)
        mask.tril_(own).triu_(own - window.left)
        mask = mask.expand(batch, 1, *mask.shape)
    setattr(mask, _ATTRIBUTE, (window, id(mask), mask._version))
    return mask


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two functions have the same code and enclose the same numbers and functions."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if not isinstance(one, types.FunctionType) or not isinstance(other, types.FunctionType):
        return type(one) is type(other) and type(one) is int and bool(one == other)
    if one is other:
        return True
    if one.__code__ is not other.__code__ or (one.__defaults__, other.__defaults__) != (None, None):
        return False
    enclosed, of_other = (
        tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other)
    )
    return _are_alike(enclosed, of_other)
