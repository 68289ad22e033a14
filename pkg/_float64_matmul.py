"""How products of float64 matrices are made, where units for narrower numbers can make them.

On the CPU Intel's AMX multiplies bytes and adds exactly. Fifteen such products, of the remainders
of scaled integers for fifteen moduli, give a product of float64 by the Chinese remainder theorem,
faster than fused multiply-adds where matrices are large, and with a smaller error. The kernels read
the choice in the library that they are in (``csrc/cpu/residues``), where this module brings it.
"""

from __future__ import annotations

import os
from ctypes import c_int64

from . import _loader, _matmul_ways
from ._float32_matmul import has_tiles

WAYS = {"residues": 1, "fma": 0}
"""The ways that can be asked for, and what the CPU library is told."""

_chosen = "residues"


def set_float64_matmul(way: str) -> None:
    """Sets how large float64 matrices are multiplied on the CPU, for the whole process.

    It holds on a CPU with Intel AMX, for ``matmul`` and ``linear``, their gradients, and PyTorch's
    own products under :func:`pkg.accelerate`. Elsewhere all are made by fused multiply-adds.

    Args:
        way: ``"residues"``, the default: products of matrices of about 500 rows, columns and terms
            or more by fifteen exact products of bytes. An element's error is at most half of what
            fused multiply-adds promise (terms times 2^-53 times the sum of the magnitudes of the
            products), and is a tenth of theirs as a rule; where values' sizes differ so much that
            it could be more, and where one is infinite or NaN, multiply-adds make the element.
            Takes memory for 16 bytes of each value of an operand meanwhile, of up to 2048 rows at
            a time: about 0.1 GiB a thread at most, or as much as operands and result take.
            ``"fma"``: by fused multiply-adds.

    Raises:
        ValueError: there is no such way.
        RuntimeError: it is called in a region that ``torch.compile`` compiles.

    Example:
        >>> import pkg
        >>> pkg.set_float64_matmul("fma")
        >>> pkg.get_float64_matmul()
        'fma'
        >>> pkg.set_float64_matmul("residues")
    """
    global _chosen
    _matmul_ways.check("pkg.set_float64_matmul", way, WAYS)
    _chosen = way
    _tell()


def get_float64_matmul() -> str:
    """What :func:`set_float64_matmul` or ``PKG_FLOAT64_MATMUL`` has set, else ``"residues"``."""
    return _chosen


def description() -> str:
    """For ``python -m pkg env``."""
    return _chosen if has_tiles() else "fma (no tile registers)"


def begin() -> None:
    """On import: takes the environment's choice.

    Raises:
        ImportError: ``PKG_FLOAT64_MATMUL`` has a value that it cannot have.
    """
    global _chosen
    asked = os.environ.get("PKG_FLOAT64_MATMUL", "").strip().lower()
    if asked and asked not in WAYS:
        raise ImportError(
            f"PKG_FLOAT64_MATMUL is '{asked}'; it must be one of {', '.join(WAYS)}, or unset"
        )
    _chosen = asked or "residues"
    _tell()


def _tell() -> None:
    # pkg.jit may have left the function out.
    if hasattr(_loader.cpu_library, "pkg_choose_float64_residues"):
        _loader.cpu_library.pkg_choose_float64_residues(c_int64(WAYS[_chosen]))
