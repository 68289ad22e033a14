"""The public operators, one module each."""

from .add_out import add_out
from .d_sigmoid import d_sigmoid
from .decode_attention import decode_attention
from .linear import linear
from .matmul import matmul
from .mul import mul
from .muladd import muladd
from .pack_linear_weight import pack_linear_weight
from .packed_linear import packed_linear
from .scaled_dot_product_attention import scaled_dot_product_attention
from .scaled_dot_product_attention_varlen import scaled_dot_product_attention_varlen

__all__ = [
    "add_out",
    "d_sigmoid",
    "decode_attention",
    "linear",
    "matmul",
    "mul",
    "muladd",
    "pack_linear_weight",
    "packed_linear",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_varlen",
]
