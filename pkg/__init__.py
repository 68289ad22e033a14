"""Custom PyTorch operators for CPU and CUDA, in one wheel for every PyTorch.

Importing the package loads its compiled libraries and registers the operators
as ``torch.ops.pkg.*``. They are public functions of :mod:`pkg.ops`, and plain
functions of the same names in ``pkg._C``. :mod:`pkg.nn` holds modules over them,
:mod:`pkg.integrations` leads other packages to them, and :func:`accelerate` leads
PyTorch's own operators to them.

Example:
    >>> import torch, pkg
    >>> pkg.ops.muladd(torch.ones(2), torch.full((2,), 3.0), 0.5)
    tensor([3.5000, 3.5000])
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import _loader, jit

try:
    _C = _loader.load()
    from . import _float32_matmul, _float64_matmul, _flops, integrations, nn, ops
    from ._float32_matmul import get_float32_matmul, set_float32_matmul
    from ._float64_matmul import get_float64_matmul, set_float64_matmul
    from .accelerate import accelerate
    from .doctor import doctor
    from .packing import pack_weights_
    from .quantization import quantize_
    from .replacing import replace_modules, restore_modules

    _float32_matmul.begin()
    _float64_matmul.begin()
    _flops.register_when_imported()
except BaseException as error:
    if isinstance(error, Exception) and _loader.describes_itself():
        from .environment import describe_failed_import

        raise SystemExit(describe_failed_import(error)) from None
    # Leave no half of the package behind: the next import starts afresh.
    _loader.forget(__name__)
    raise
from .version import __version__

if TYPE_CHECKING:
    from . import testing
else:

    def __getattr__(name: str) -> ModuleType:
        """``pkg.testing``, imported where it is used first: few programs test operators."""
        if name != "testing":
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        return importlib.import_module(".testing", __name__)

    def __dir__() -> list[str]:
        """What is public, ``pkg.testing`` too."""
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "__version__",
    "accelerate",
    "doctor",
    "get_float32_matmul",
    "get_float64_matmul",
    "integrations",
    "jit",
    "nn",
    "ops",
    "pack_weights_",
    "quantize_",
    "replace_modules",
    "restore_modules",
    "set_float32_matmul",
    "set_float64_matmul",
    "testing",
]
