"""Other packages' and PyTorch's own ways, led to the operators of :mod:`pkg.ops`.

:mod:`pkg.integrations.transformers` gives Hugging Face's models ``attn_implementation="pkg"``, and
:mod:`pkg.integrations.flash_attn` has the functions of flash-attn, on the CPU too;
:mod:`pkg.integrations.distributed` tells DTensor how operators may be split among processes.
Importing them imports nothing but PyTorch.
"""

from . import distributed, flash_attn, transformers

__all__ = ["distributed", "flash_attn", "transformers"]
