"""``pack_tensor_core_tiled_layout``: 4-bit values in the order of the tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._registration import register_fake
from ._sharding import Description, register_sharding
from ._tensor_core_tiled_layout import check_inner_k_tiles

TABLE = (
    "values from 0 to 15, eight to a word, in the order of the GPU's tensor cores",
    "int32, or uint8 with two in each byte",
    "no",
)
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def pack_tensor_core_tiled_layout(w: Tensor, inner_k_tiles: int) -> Tensor:
    """Packs values of four bits into the tensor-core tiled layout.

    It is the order in which ``mma.m16n8k16`` takes its right operand, and that of PyTorch's
    ``_convert_weight_to_int4pack`` on CUDA. The four words (lanes t, t+1, t+2, t+3 with
    t % 4 == 0) that hold a block of 32 columns of a row have eight values each.

    Args:
        w: Any strides; columns are a multiple of ``16 * inner_k_tiles``. int32, shape (rows,
            columns), values from 0 to 15; or uint8, shape (rows, columns / 2), two values in each
            byte, the even column in the high four bits, as ``_convert_weight_to_int4pack`` takes
            them. (:func:`pkg.ops.pack_int4` has it in the low ones.)
        inner_k_tiles: How many tiles of 16 columns a supertile has: 2, 4 or 8.

    Returns:
        int32, shape (ceil(rows / 8), columns / (16 * inner_k_tiles), 32, inner_k_tiles / 2). Rows
        that fill up the last tile hold zeros, and whatever reads the weight takes them for rows
        of it: scales and zeros are needed for them too. Lane t of row tile r holds row
        8 r + t / 4. Word w of supertile s holds columns c, c + 1, c + 8,
        c + 9, c + 16, c + 17, c + 24 and c + 25, of which the even come first, from the lowest
        bits on, for c = 16 (inner_k_tiles s + 2 w) + 2 (t % 4).

    Raises:
        RuntimeError: ``w`` is no matrix of int32 or uint8, its columns do not divide,
            ``inner_k_tiles`` is another number, or, on the CPU, an int32 value does not fit in four
            bits. On CUDA its lowest four bits are taken.

    Example:
        >>> w = torch.arange(8 * 32, dtype=torch.int32).view(8, 32) % 16
        >>> packed = pack_tensor_core_tiled_layout(w, 2)
        >>> packed.shape
        torch.Size([1, 1, 32, 1])
        >>> f"{packed[0, 0, 1, 0].item() & 0xFFFFFFFF:08x}"
        'b3b3a2a2'
    """
    return torch.ops.pkg.pack_tensor_core_tiled_layout.default(w, inner_k_tiles)


@register_fake("pack_tensor_core_tiled_layout")
def _fake(w: Tensor, inner_k_tiles: int) -> Tensor:
    name = "pack_tensor_core_tiled_layout"
    check_inner_k_tiles(name, inner_k_tiles)
    torch._check(w.dim() == 2, lambda: f"{name}: w must have two dimensions")
    supertile = 16 * inner_k_tiles
    columns = w.shape[1] * 2 if w.dtype == torch.uint8 else w.shape[1]
    torch._check(
        columns % supertile == 0, lambda: f"{name}: columns must be a multiple of {supertile}"
    )
    shape = ((w.shape[0] + 7) // 8, columns // supertile, 32, inner_k_tiles // 2)
    return w.new_empty(shape, dtype=torch.int32)


def _vmap(
    info: Any, in_dims: Sequence[int | None], w: Tensor, inner_k_tiles: int
) -> tuple[Tensor, int]:
    # Rows do not mix: the batch is more of them, in whole tiles.
    rows = w.movedim(in_dims[0] or 0, 0)
    if rows.shape[1] % 8:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % 8))
    packed = pack_tensor_core_tiled_layout(rows.flatten(0, 1), inner_k_tiles)
    return packed.unflatten(0, (rows.shape[0], rows.shape[1] // 8)), 0


def _sharding(w: Description, inner_k_tiles: int) -> str:
    values_of_element = 2 if w.dtype == torch.uint8 else 1
    return f"w o i/{values_of_element} -> o/8 i/{16 * inner_k_tiles} _ _"


torch.library.register_vmap("pkg::pack_tensor_core_tiled_layout", _vmap)
register_sharding("pack_tensor_core_tiled_layout", _sharding)
