"""The compiled module: build facts and the operators as plain functions."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

class BuildInfo(TypedDict):
    version: str
    namespace: str
    compiler: str
    flags: str
    stable_abi_target: str
    built_with_torch: str
    cuda_toolkit: str | None
    cpu_levels: list[str]
    cuda_architectures: str
    libraries: list[str]

def build_info() -> BuildInfo: ...
def cpu_capability() -> str | None: ...
def _set_cpu_capability(capability: str) -> None: ...
def cpu_capabilities() -> list[str]: ...
def _use_kernels(find_kernel: int | None) -> None: ...
def _use_accelerated(addmm: int | None, attention: int | None) -> None: ...
def _let_products_call_shim(may: bool) -> None: ...
def _accelerated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    /,
    *of_backward: Tensor,
) -> tuple[Tensor, ...] | None: ...
def _product_kernel(
    operator: int, original: Callable[..., Any], keys: object
) -> Callable[..., Any]: ...
def _draw(
    generator: torch.Generator, count: int, count_bytes: int | None, draw_states: int | None
) -> tuple[int, bytes]: ...
def _bernoulli_kernel(
    ours: Callable[..., Any], theirs: Callable[..., Any], keys: object, least: int
) -> Callable[..., Any]: ...
def _finds_tensor_words() -> bool: ...
def _use_unstable_symbols(any: bool) -> dict[str, bool]: ...
def _set_short_way(
    name: str,
    *,
    record: Callable[..., Any] | None = None,
    has_autocast: bool | None = None,
    observed_as: str | None = None,
    below_autograd: Callable[..., Any] | None = None,
) -> None: ...
def _by_position(name: str) -> Callable[..., Any]: ...
def _inner_call(
    name: str,
    otherwise: Callable[..., Any],
    record: Callable[..., Any] | None,
    is_observed: bool,
    is_checked: bool,
    has_autocast: bool,
) -> Callable[..., Any]: ...
def _call_below_autograd(
    name: str,
    device: str,
    otherwise: Callable[..., Any],
    record: Callable[..., Any],
    *,
    has_autocast: bool = ...,
) -> Callable[..., Any]: ...
def _is_forward_mode() -> bool: ...
def _saving_forward(
    function: Callable[..., Any], otherwise: Callable[..., Any] | None = ...
) -> Callable[..., Any]: ...

# From here on made by `make generate`, from the schemas of csrc/library.cpp.
def muladd(a: Tensor, b: Tensor, c: float) -> Tensor: ...
def mul(a: Tensor, b: Tensor) -> Tensor: ...
def add_out(a: Tensor, b: Tensor, out: Tensor) -> None: ...
def d_sigmoid(z: Tensor) -> Tensor: ...
def d_sigmoid_backward(grad: Tensor, z: Tensor) -> Tensor: ...
def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = ...) -> Tensor: ...
def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = ..., activation: str | None = ...
) -> Tensor: ...
def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]: ...
def linear_activation_backward(grad: Tensor, saved: Tensor, activation: str) -> Tensor: ...
def pack_linear_weight(weight: Tensor) -> Tensor: ...
def packed_linear(
    input: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = ...,
    activation: str | None = ...,
) -> Tensor: ...
def rowwise_scaled_linear_s8s4(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...
def rowwise_scaled_linear_s4s4(
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...
def quantize_rowwise(input: Tensor, bits: int = ...) -> tuple[Tensor, Tensor]: ...
def pack_tensor_core_tiled_layout(w: Tensor, inner_k_tiles: int) -> Tensor: ...
def unpack_tensor_core_tiled_layout(packed_w: Tensor, inner_k_tiles: int) -> Tensor: ...
def dequantize_tensor_core_tiled_layout(
    packed_w: Tensor, scales_and_zeros: Tensor, group_size: int, inner_k_tiles: int
) -> Tensor: ...
def int4_linear(
    input: Tensor,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = ...,
) -> Tensor: ...
def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]: ...
def lltm_sequence(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]: ...
def lltm_forward(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]: ...
def lltm_backward(
    grad_hidden: Tensor | None,
    grad_cells: Tensor | None,
    grad_gates: Tensor | None,
    gates: Tensor,
    hidden: Tensor,
    cells: Tensor,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
    needs_input: bool,
    needs_weights: bool,
    needs_old_h: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
) -> Tensor: ...
def scaled_dot_product_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    keeps_residual: bool,
    alibi_slopes: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def scaled_dot_product_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needs_mask_grad: bool,
    alibi_slopes: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = ...,
    scale: float | None = ...,
    window_left: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
) -> Tensor: ...
def attention_dropout_mask(
    seed: Tensor, batch: int, rows: int, columns: int, dropout_p: float
) -> Tensor: ...
def scaled_dot_product_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
) -> Tensor: ...
def scaled_dot_product_attention_varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    keeps_residual: bool,
    alibi_slopes: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def scaled_dot_product_attention_varlen_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_seed: Tensor | None,
    output: Tensor,
    log_sum_exp: Tensor,
    output_residual: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    alibi_slopes: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def rotary_embedding(
    input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ...
) -> Tensor: ...
def rotary_embedding_backward(
    grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor: ...
def spatial_correlation_sample(
    input1: Tensor,
    input2: Tensor,
    kernel_size: int | tuple[int, int] = ...,
    patch_size: int | tuple[int, int] = ...,
    stride: int | tuple[int, int] = ...,
    padding: int | tuple[int, int] = ...,
    dilation: int | tuple[int, int] = ...,
    dilation_patch: int | tuple[int, int] = ...,
) -> Tensor: ...
def spatial_correlation_sample_backward(
    grad: Tensor,
    other: Tensor,
    of_input2: bool,
    kernel_size: int | tuple[int, int],
    patch_size: int | tuple[int, int],
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    dilation: int | tuple[int, int],
    dilation_patch: int | tuple[int, int],
) -> Tensor: ...
