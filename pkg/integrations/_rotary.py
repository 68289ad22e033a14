"""Rotary embedding as flash-attn has it: tables of all positions, and places in them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._arguments import check_indices, check_range
from ..ops.rotary_embedding import rotary_embedding


class Rotary:
    """Rotary embedding (https://arxiv.org/abs/2104.09864) by tables of all positions.

    Args:
        name: The function that was called, for errors.
        cos: Shape (positions, R / 2).
        sin: Likewise.
        interleaved: Whether neighbours are turned together.
        prefix: What ``cos`` and ``sin`` are called begins with it.
    """

    def __init__(
        self,
        name: str,
        cos: Tensor | None,
        sin: Tensor | None,
        interleaved: bool,
        prefix: str = "",
    ) -> None:
        self.name = f"{name}: {prefix}"
        if cos is None or sin is None:
            raise RuntimeError(f"{name}: of {prefix}cos and {prefix}sin only one is given")
        if cos.dim() != 2 or cos.shape != sin.shape:
            raise RuntimeError(
                f"{self.name}cos is of shape {list(cos.shape)} and {prefix}sin of "
                f"{list(sin.shape)}; both must be (positions, half of what is turned)"
            )
        self.cos, self.sin, self.interleaved = cos, sin, interleaved

    def __call__(self, tensor: Tensor, places: Tensor) -> Tensor:
        """Turns a tensor of shape (..., heads, E) by its places, of shape (...) from the right."""
        positions, half = self.cos.shape
        if 2 * half > tensor.shape[-1]:
            raise RuntimeError(
                f"{self.name}cos has {half} columns, which turn {2 * half} elements; a head has "
                f"{tensor.shape[-1]}"
            )
        if places.device.type == "cpu":
            check_range(places, 0, positions - 1, f"{self.name}cos is asked for rows")
        cos, sin = (
            _table(each[places].unsqueeze(-2), tensor.dtype) for each in (self.cos, self.sin)
        )
        return rotary_embedding(tensor, cos, sin, interleaved=self.interleaved)


def _table(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As the operator takes it for a tensor of this dtype: of that, or float32 at least."""
    if values.dtype == dtype:
        return values
    return values.to(torch.promote_types(dtype, torch.float32))


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotary embedding, by :func:`pkg.ops.rotary_embedding`; flash-attn has it in layers.rotary.

    Args:
        x: Shape (B, L, H, D), or (tokens, H, D) together with ``cu_seqlens``.
        cos: Shape (positions, R / 2) with R <= D: the first R elements of a head are turned.
        sin: Likewise.
        interleaved: Whether neighbouring elements are turned together, or else those of the two
            halves of R.
        inplace: Whether the result is written to ``x`` too, which is returned.
        seqlen_offsets: The position of the first token, of all sequences or, int32 or int64 of
            shape (B,), of each.
        cu_seqlens: int32 or int64 of shape (B + 1,): where sequences begin in a packed batch, and
            where the last one ends. Tokens of no sequence are turned as a first one.
        max_seqlen: Of the longest sequence; not needed here.

    Returns:
        The shape and dtype of ``x``. Differentiable, in ``cos`` and ``sin`` too.

    Raises:
        RuntimeError: Shapes do not match, the tables have no row for a position, or, on the CPU,
            ``cu_seqlens`` does not lead from 0 or more to the tokens or less without going back.

    Example:
        >>> cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
        >>> apply_rotary_emb(torch.ones(1, 2, 1, 2), cos, sin).flatten(1)
        tensor([[ 1.,  1., -1.,  1.]])
    """
    name = "apply_rotary_emb"
    rank, layout = (4, "(batch, tokens,") if cu_seqlens is None else (3, "(tokens,")
    if x.dim() != rank:
        raise RuntimeError(
            f"{name}: x is of shape {list(x.shape)}; it must be {layout} heads, size)"
        )
    turn = Rotary(name, cos, sin, interleaved)
    if cu_seqlens is None:
        first = seqlen_offsets
        if isinstance(first, Tensor):
            check_indices(name, "seqlen_offsets", first, len(x), "the batch of x")
            first = first[:, None]
        turned = turn(x, first + torch.arange(x.shape[1], device=x.device))
    else:
        _check_sequences(name, len(x), cu_seqlens, seqlen_offsets)
        turned = turn(x, _places_in_sequences(len(x), cu_seqlens, seqlen_offsets))
    return x.copy_(turned) if inplace else turned


def _check_sequences(name: str, tokens: int, cu_seqlens: Tensor, offsets: int | Tensor) -> None:
    check_indices(name, "cu_seqlens", cu_seqlens, None, "sequences + 1")
    if isinstance(offsets, Tensor):
        check_indices(name, "seqlen_offsets", offsets, len(cu_seqlens) - 1, "the sequences")
    if cu_seqlens.device.type == "cpu":
        check_range(cu_seqlens, 0, tokens, f"{name}: cu_seqlens has offsets")
        check_range(cu_seqlens.diff(), 0, tokens, f"{name}: cu_seqlens has lengths of sequences")


def _places_in_sequences(tokens: int, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """Of each token of a packed batch, within its own sequence."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), token, right=True)
    places = token - cu_seqlens[sequence]
    places = places + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    return places.where((token >= cu_seqlens[0]) & (token < cu_seqlens[-1]), 0)
