"""How exact products of float32 matrices are, where units for narrower numbers can make them.

On the CPU Intel's AMX multiplies bfloat16. A float32 is the sum of three of them, so that six
products of such parts give a product of float32 that is as exact as one by fused multiply-adds,
three products give half of its digits and one those of bfloat16. On CUDA the tensor cores of
compute capability 9.0 make the same six, and all multiply TF32, which has 11 of float32's 24
significant bits. PyTorch has words for these: :func:`torch.set_float32_matmul_precision`.

The kernels read the choice where it costs nothing, in the library that they are in, which calls no
function of PyTorch that could tell it. So it is told: PyTorch keeps its setting in C++ and has
three functions by which Python changes it, and :func:`follow_pytorch` puts a function around each
that calls it and then reads what was set.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from ctypes import CDLL, c_int64
from typing import Any

import torch

from . import _loader, _matmul_ways

PRODUCTS = {"fma": 0, "highest": 6, "high": 3, "medium": 1}
"""Of the ways that can be asked for, how many products of parts each makes on the CPU."""

CUDA_PRODUCTS = {"fma": 0, "highest": 6, "high": 1, "medium": 1}
"""The same on CUDA: six of bfloat16 parts, one in TF32; none: multiply-adds."""

# PyTorch's words, and what it calls the part of it whose words are those for a device.
_OF_PYTORCH = {"tf32": "high", "bf16": "medium"}
_BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
_SETTERS = (
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
)

_lock = threading.Lock()
_chosen = "pytorch"


def set_float32_matmul(way: str) -> None:
    """Sets how float32 matrices are multiplied, for the whole process.

    On a CPU with Intel AMX it holds for every operator of this package that multiplies matrices by
    tile registers, and for PyTorch's own under :func:`pkg.accelerate`. Where the processor, or the
    CPU library in use, has no tile registers, every way is by fused multiply-adds. On CUDA it holds
    for ``matmul``, ``linear``, ``packed_linear`` and what of ``lltm`` goes by their kernels; all
    else is by multiply-adds.

    Args:
        way: ``"pytorch"``, as :func:`torch.set_float32_matmul_precision` says, or for the CPU
            ``torch.backends.mkldnn.matmul.fp32_precision`` and for CUDA
            ``torch.backends.cuda.matmul.fp32_precision`` or ``allow_tf32``, which is the default;
            ``"highest"``, by six products of bfloat16 parts, at least as exact as PyTorch's: on the
            CPU with AMX, and of large matrices on GPUs of compute capability 9.0, which takes
            memory of 6 bytes for each of their elements meanwhile; on other GPUs by multiply-adds;
            ``"high"``, on the CPU by three, to about 16 bits, on CUDA by one in TF32, to 11 bits;
            ``"medium"``, on the CPU by one, to the 8 bits of bfloat16, on CUDA as ``"high"``;
            ``"fma"``, by fused multiply-adds, slower than ``"highest"`` where that is by six.

    Raises:
        ValueError: there is no such way.
        RuntimeError: it is called in a region that ``torch.compile`` compiles.

    Example:
        >>> import pkg
        >>> pkg.set_float32_matmul("fma")
        >>> pkg.get_float32_matmul()
        'fma'
        >>> pkg.set_float32_matmul("pytorch")
    """
    global _chosen
    _matmul_ways.check("pkg.set_float32_matmul", way, ["pytorch", *PRODUCTS])
    _chosen = way
    _tell()


def get_float32_matmul() -> str:
    """What :func:`set_float32_matmul` or ``PKG_FLOAT32_MATMUL`` has set, else ``"pytorch"``."""
    return _chosen


def way_in_use(device: str = "cpu") -> str:
    """The way on ``"cpu"`` or ``"cuda"``, also where it is PyTorch's setting that says which."""
    if _chosen != "pytorch":
        return _chosen
    word = torch._C._get_fp32_precision_getter(_BACKENDS[device], "matmul")
    return _OF_PYTORCH.get(word, "highest")


def has_tiles() -> bool:
    """Whether the CPU library in use multiplies by tile registers."""
    # pkg.jit may have compiled a part of the kernels alone.
    return hasattr(_loader.cpu_library, "pkg_has_tiles") and bool(
        _loader.cpu_library.pkg_has_tiles()
    )


def description() -> str:
    """For ``python -m pkg env``."""
    if not has_tiles():
        return "fma (no tile registers)"
    return f"{way_in_use()} ({_who_chose()})"


def description_of_cuda() -> str:
    """The same of the CUDA kernels."""
    if _loader.cuda_library is None:
        return "none (no CUDA kernels)"
    way = way_in_use("cuda")
    made = {0: "multiply-adds", 1: "TF32", 6: "six products on 9.0, else by multiply-adds"}
    return f"{way}, by {made[CUDA_PRODUCTS[way]]} ({_who_chose()})"


def _who_chose() -> str:
    return f"as {'PyTorch' if _chosen == 'pytorch' else 'pkg'} was told"


def begin() -> None:
    """On import: takes the environment's choice, and follows PyTorch's setting from then on.

    Raises:
        ImportError: ``PKG_FLOAT32_MATMUL`` has a value that it cannot have.
    """
    global _chosen
    asked = os.environ.get("PKG_FLOAT32_MATMUL", "").strip().lower()
    if asked and asked not in PRODUCTS:
        raise ImportError(
            f"PKG_FLOAT32_MATMUL is '{asked}'; it must be one of {', '.join(PRODUCTS)}, or unset "
            "for what torch.set_float32_matmul_precision says"
        )
    _chosen = asked or "pytorch"
    follow_pytorch()
    _tell()


def follow_pytorch() -> None:
    """Puts our function around PyTorch's three, for every name that they are called by.

    ``torch.set_float32_matmul_precision``, also where it was imported by name before, and the
    properties ``fp32_precision`` and ``allow_tf32`` below ``torch.backends`` look them up in
    ``torch._C`` each time.
    """
    for name in _SETTERS:
        setter = getattr(torch._C, name, None)
        if setter is not None:
            # Of an import of this package that failed later, or of one that was forgotten.
            setattr(torch._C, name, _telling(getattr(setter, "_before_pkg", setter)))


def _telling(setter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setter)
    def set_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = setter(*args, **kwargs)
        _tell()
        return result

    set_and_tell._before_pkg = setter  # type: ignore[attr-defined]
    return set_and_tell


def _tell() -> None:
    # Of two threads that set it at once, the one that tells last has seen what both set.
    with _lock:
        _tell_library(_loader.cpu_library, "pkg_choose_float32_products", PRODUCTS[way_in_use()])
        _tell_library(
            _loader.cuda_library,
            "pkg_choose_cuda_float32_products",
            CUDA_PRODUCTS[way_in_use("cuda")],
        )


def _tell_library(library: CDLL | None, function: str, products: int) -> None:
    """Calls the function of a library that is told the number; pkg.jit may have left it out."""
    if hasattr(library, function):
        getattr(library, function)(c_int64(products))
