"""The compiled module: build facts and the operators as plain functions."""

from typing import TypedDict

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
    cuda_architectures: str
    libraries: list[str]

def build_info() -> BuildInfo: ...
def cpu_capability() -> str | None: ...
def _set_cpu_capability(capability: str) -> None: ...
def cpu_capabilities() -> list[str]: ...
def muladd(a: Tensor, b: Tensor, c: float) -> Tensor: ...
def mul(a: Tensor, b: Tensor) -> Tensor: ...
def add_out(a: Tensor, b: Tensor, *, out: Tensor) -> None: ...
def d_sigmoid(z: Tensor) -> Tensor: ...
def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = ...) -> Tensor: ...
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
) -> Tensor: ...
