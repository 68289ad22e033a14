"""The public operators, one module each."""

from .add_out import add_out
from .d_sigmoid import d_sigmoid
from .matmul import matmul
from .mul import mul
from .muladd import muladd
from .scaled_dot_product_attention import scaled_dot_product_attention

__all__ = [
    "add_out",
    "d_sigmoid",
    "matmul",
    "mul",
    "muladd",
    "scaled_dot_product_attention",
]
