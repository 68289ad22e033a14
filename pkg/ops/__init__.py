"""The operators: functions of tensors, on the CPU and on CUDA, one module each."""

# Made by `make generate`.

from .add_out import add_out
from .d_sigmoid import d_sigmoid
from .decode_attention import decode_attention
from .dequantize_tensor_core_tiled_layout import dequantize_tensor_core_tiled_layout
from .int4_linear import int4_linear
from .linear import linear
from .lltm import lltm
from .lltm_sequence import lltm_sequence
from .matmul import matmul
from .mul import mul
from .muladd import muladd
from .pack_int4 import pack_int4 as pack_int4
from .pack_int4 import unpack_int4 as unpack_int4
from .pack_linear_weight import pack_linear_weight
from .pack_tensor_core_tiled_layout import pack_tensor_core_tiled_layout
from .packed_linear import packed_linear
from .quantize_rowwise import quantize_rowwise
from .rotary_embedding import rotary_embedding
from .rowwise_scaled_linear_s4s4 import rowwise_scaled_linear_s4s4
from .rowwise_scaled_linear_s8s4 import rowwise_scaled_linear_s8s4
from .scaled_dot_product_attention import scaled_dot_product_attention
from .scaled_dot_product_attention_varlen import scaled_dot_product_attention_varlen
from .spatial_correlation_sample import spatial_correlation_sample
from .unpack_tensor_core_tiled_layout import unpack_tensor_core_tiled_layout

__all__ = [
    "add_out",
    "d_sigmoid",
    "decode_attention",
    "dequantize_tensor_core_tiled_layout",
    "int4_linear",
    "linear",
    "lltm",
    "lltm_sequence",
    "matmul",
    "mul",
    "muladd",
    "pack_linear_weight",
    "pack_tensor_core_tiled_layout",
    "packed_linear",
    "quantize_rowwise",
    "rotary_embedding",
    "rowwise_scaled_linear_s4s4",
    "rowwise_scaled_linear_s8s4",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_varlen",
    "spatial_correlation_sample",
    "unpack_tensor_core_tiled_layout",
]
