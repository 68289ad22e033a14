"""A tensor of CUDA where there may be none, for tests of the way that a call with it takes.

It is of PyTorch's own type and has the device's dispatch keys, which a fake tensor does not.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class _Description(ctypes.Structure):
    """DLPack's ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int),
        ("device_index", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CUDA, _FLOAT = 2, 2  # by dlpack.h
_MEMORY = (ctypes.c_float * 4)()
_SIZES, _STRIDES = (ctypes.c_int64 * 1)(4), (ctypes.c_int64 * 1)(1)
_DESCRIPTION = _Description(
    *(ctypes.addressof(_MEMORY), _CUDA, 0, 1),
    *(_FLOAT, 32, 1),
    *(_SIZES, _STRIDES, 0, None, None),
)


def cuda_tensor() -> Tensor:
    """Four float32 on CUDA, for no kernel: their memory may be the CPU's."""
    if torch.cuda.is_available():
        return torch.zeros(4, device="cuda")
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    with FakeTensorMode():  # in which PyTorch does not look for the device
        tensor: Tensor = torch.utils.dlpack.from_dlpack(
            new(ctypes.addressof(_DESCRIPTION), b"dltensor", None)
        )
    assert type(tensor) is Tensor
    assert tensor.device.type == "cuda"
    return tensor
