"""``unpack_tensor_core_tiled_layout``: the values of a packed weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._registration import register_fake
from ._sharding import Description, register_sharding
from ._tensor_core_tiled_layout import weight_shape

TABLE = ("its inverse", "int32", "no")
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def unpack_tensor_core_tiled_layout(packed_w: Tensor, inner_k_tiles: int) -> Tensor:
    """The inverse of :func:`pkg.ops.pack_tensor_core_tiled_layout`.

    Args:
        packed_w: int32, shape (rows / 8, columns / (16 * inner_k_tiles), 32, inner_k_tiles / 2),
            any strides.
        inner_k_tiles: With which it was packed: 2, 4 or 8.

    Returns:
        int32, shape (rows, columns), values from 0 to 15.

    Raises:
        RuntimeError: ``packed_w`` has another shape or dtype, or ``inner_k_tiles`` is another
            number.

    Example:
        >>> w = torch.arange(8 * 32, dtype=torch.int32).view(8, 32) % 16
        >>> packed = torch.ops.pkg.pack_tensor_core_tiled_layout(w, 2)
        >>> torch.equal(unpack_tensor_core_tiled_layout(packed, 2), w)
        True
    """
    return torch.ops.pkg.unpack_tensor_core_tiled_layout.default(packed_w, inner_k_tiles)


@register_fake("unpack_tensor_core_tiled_layout")
def _fake(packed_w: Tensor, inner_k_tiles: int) -> Tensor:
    return packed_w.new_empty(
        weight_shape("unpack_tensor_core_tiled_layout", packed_w, inner_k_tiles)
    )


def _vmap(
    info: Any, in_dims: Sequence[int | None], packed_w: Tensor, inner_k_tiles: int
) -> tuple[Tensor, int]:
    # Rows do not mix: the batch is more of them.
    tiles = packed_w.movedim(in_dims[0] or 0, 0)
    rows = unpack_tensor_core_tiled_layout(tiles.flatten(0, 1), inner_k_tiles)
    return rows.unflatten(0, (tiles.shape[0], 8 * tiles.shape[1])), 0


def _sharding(packed_w: Description, inner_k_tiles: int) -> str:
    return f"packed_w o/8 i/{16 * inner_k_tiles} _ _ -> o i"


torch.library.register_vmap("pkg::unpack_tensor_core_tiled_layout", _vmap)
register_sharding("unpack_tensor_core_tiled_layout", _sharding)
