"""gelu and silu of PyTorch by the activations of ``linear``, under :func:`pkg.accelerate`.

PyTorch's functions work on one register after the other, which leaves most of a processor's
arithmetic waiting; ours work on six side by side (``csrc/cpu/simd/math.h``). Kernels in C++
(``csrc/cpu/accelerate/aten_activations.cpp``) take calls whose ratio in the table is enough.

They are registered only where the table has such a ratio: a call that comes by there and is left to
PyTorch takes half a microsecond longer (``tools/left_alone.py``).
"""

from __future__ import annotations

OPERATORS = ("gelu", "gelu_backward", "silu", "silu_backward")
OVERLOADS = (
    *("gelu", "gelu.out", "gelu_", "gelu_backward", "gelu_backward.grad_input"),
    *("silu", "silu.out", "silu_", "silu_backward", "silu_backward.grad_input"),
)
CURVES = ("gelu", "gelu tanh", "silu")
"""In the order of ``Curve`` in csrc/cpu/accelerate/routes.h."""
