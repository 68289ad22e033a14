"""Words for arguments that an operator does not take, where PyTorch has none that name them.

Called by ``csrc/python/operator_call.cpp``, once a call has failed or cannot succeed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SYMBOLS = {
    "float": (torch.SymFloat, torch.SymInt),
    "int": (torch.SymInt,),
    "bool": (torch.SymBool,),
}


def check_type(operator: str, name: str, expected: str, value: Any) -> None:
    """Refuses a value that is of no type which the operator takes.

    Args:
        operator: Its name.
        name: The argument's.
        expected: What the argument must be: ``"a float or None"``.
        value: It is not of that very type, but may be a symbolic number of a graph, a NumPy
            scalar, a tensor of one element, or what takes part in tracing.

    Raises:
        TypeError: It is none of these. A number is no bool, and a bool is no number.
    """
    if hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor):
        return  # a proxy of torch.fx, for one
    kind = expected.removesuffix(" or None").split(" ", 1)[1]
    if kind.startswith("int or a sequence"):
        is_taken = isinstance(value, (list, tuple, torch.Size)) and all(
            _is_number("int", item) for item in value
        )
        is_taken = is_taken or _is_number("int", value)
    elif kind == "str":
        is_taken = isinstance(value, str)
    else:
        is_taken = kind in _SYMBOLS and _is_number(kind, value)
    if not is_taken:
        raise TypeError(f"{operator}: {name} is {_described(value)}; it must be {expected}")


def _is_number(kind: str, value: Any) -> bool:
    """Whether a value stands for a number of that kind where PyTorch takes one."""
    if isinstance(value, _SYMBOLS[kind]):
        return True
    if isinstance(value, Tensor):
        # One that autograd follows would lose its gradient.
        if value.dim() or value.requires_grad or value.is_complex() or _is_transformed(value):
            return False
        is_bool, is_integer = value.dtype == torch.bool, not value.is_floating_point()
    else:
        # NumPy's scalars have the methods of Python's; its bool has a dtype of kind b.
        is_bool = (
            isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"
        )
        is_integer = hasattr(value, "__index__")
    if kind == "bool":
        return is_bool
    if is_bool or isinstance(value, complex):
        return False
    return is_integer or (kind == "float" and hasattr(value, "__float__"))


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of torch.func follows a tensor: it has no one number then."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _described(value: Any) -> str:
    """What a value is, in few words."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        within = ", inside a transform of torch.func" if _is_transformed(value) else ""
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}{within}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return f"a {type(value).__name__} of {len(value)} tensors"
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__module__}.{type(value).__qualname__})".replace("builtins.", "")


def explain(operator: str, arguments: dict[str, Any], error: BaseException) -> None:
    """Raises a better error where a tensor is of a kind that has no kernels.

    PyTorch's own then lists every backend and the places of all its kernels.

    Args:
        operator: Its name.
        arguments: What it was called with, by name.
        error: What PyTorch raised. Nothing is raised where that will do.

    Raises:
        RuntimeError: Names the argument, what it is, and what to do.
    """
    if not isinstance(error, (RuntimeError, NotImplementedError, TypeError)):
        return
    for name, value in arguments.items():
        if isinstance(value, Tensor) and (kind := _exotic_kind(value)):
            what, advice = kind
            raise RuntimeError(
                f"{operator}: {name} is {what}, and must be a strided (dense) one; {advice}"
            ) from None


def _exotic_kind(tensor: Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        return (
            "a nested tensor",
            "call the operator on each of unbind(), or on to_padded_tensor(), or for attention "
            "scaled_dot_product_attention_varlen on values() and offsets()",
        )
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})", "convert it with .dequantize()"
    if tensor.layout != torch.strided:
        kind = "an mkldnn" if tensor.layout == torch._mkldnn else "a sparse"  # type: ignore[attr-defined]
        return f"{kind} tensor (layout {tensor.layout})", "convert it with .to_dense()"
    return None
