"""Convolutions in half precision by PyTorch's kernels of float32, under :func:`pkg.accelerate`.

Where oneDNN has no convolution of a dtype for a processor, float16 without AVX512-FP16 or bfloat16
without AVX-512, PyTorch unfolds the images and multiplies them by a loop of its own, group by
group. On a Zen 4 (2026-11-24, PyTorch 2.13, one thread) the 16 x 16 patches of an image of 224 x
224 took 47 ms so, of a step of 84 ms. Converted to float32, convolved by oneDNN and rounded once,
they take 2 to 4 ms, and are more exact (``csrc/cpu/accelerate/aten_convolutions.cpp``).

Convolutions of other dtypes come by there too, and then take 1.6 us longer, backward 2.4 (Zen 3,
2026-11-25, ``tools/left_alone.py``): PyTorch's way of boxing arguments for a kernel of the stable
ABI, of which four are lists. So the kernels are registered only where a dtype needs it.
"""

from __future__ import annotations

import torch

from . import _loader

OPERATORS = ("convolution", "convolution_backward")


def lacking() -> list[torch.dtype]:
    """The dtypes of half precision that oneDNN has no convolution of here."""
    asked = {
        torch.float16: "_is_mkldnn_fp16_supported",
        torch.bfloat16: "_is_mkldnn_bf16_supported",
    }
    known = torch.ops.mkldnn
    return [
        dtype
        for dtype, name in asked.items()
        if not hasattr(known, name) or not getattr(known, name)()
    ]


def are_needed() -> bool:
    """Whether there is such a dtype; the CPU library then knows which."""
    needed = lacking()
    _loader.cpu_library.pkg_accelerate_convolved_types(
        int(torch.float16 in needed), int(torch.bfloat16 in needed)
    )
    return bool(needed)
