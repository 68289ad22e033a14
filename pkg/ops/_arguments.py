"""Checks of arguments that reach Python before they reach an operator."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

INDICES = (torch.int32, torch.int64)


def check_tensor(name: str, argument: str, value: Any, must_be: str) -> None:
    """Refuses what is no tensor.

    Args:
        name: The function or module that was called.
        argument: The argument's name.
        value: The argument.
        must_be: What it has to be, in words.

    Raises:
        TypeError: It is no tensor.
    """
    check_instance(name, argument, value, Tensor, must_be)


def check_instance(
    name: str, argument: str, value: Any, types: type | tuple[type, ...], must_be: str
) -> None:
    """Refuses what is of another type.

    Args:
        name: The function or module that was called.
        argument: The argument's name.
        value: The argument.
        types: What it may be.
        must_be: The same in words.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, types):
        given = "None" if value is None else f"of type {type(value).__qualname__}"
        raise TypeError(f"{name}: {argument} is {given}; it must be {must_be}")


def bounds(values: Tensor) -> tuple[int, int]:
    """The least and the largest of integers, for which a device is waited for once."""
    least, most = torch.stack(values.aminmax()).tolist()
    return least, most


def check_range(values: Tensor, least: int, most: int, found: str) -> None:
    """Refuses integers out of a range; a program that is traced does so when it runs.

    Args:
        values: Integers, of any shape. Of another device than the CPU they are waited for.
        least: The least that is allowed.
        most: The most.
        found: What was found, in words that "that are 1 to 8" can follow.

    Raises:
        RuntimeError: An integer lies outside.
    """
    is_traced = torch.compiler.is_compiling()
    while not is_traced and torch._C._functorch.is_batchedtensor(values):  # which has no numbers
        values = torch._C._functorch.get_unwrapped(values)
    if is_traced or isinstance(values, FakeTensor):
        held = (values >= least) & (values <= most)
        torch._assert_async(held.all(), f"{found} that are out of range")
    elif values.numel():
        first, last = bounds(values)
        if first < least or last > most:
            raise RuntimeError(
                f"{found} that are {first} to {last}; they must lie between {least} and {most}"
            )


def check_indices(
    name: str, argument: str, tensor: Tensor, count: int | None, counted: str
) -> None:
    """Refuses what is no row of int32 or int64.

    Args:
        name: The function that was called.
        argument: The argument's name.
        tensor: The argument.
        count: How many there must be; None: one or more.
        counted: What there is one of for each, in words.

    Raises:
        RuntimeError: The dtype or the shape is another.
    """
    is_fit = tensor.dim() == 1 and (len(tensor) > 0 if count is None else len(tensor) == count)
    if not is_fit or tensor.dtype not in INDICES:
        shape = f"({counted},)" if count is None else f"[{count}], for {counted}"
        raise RuntimeError(
            f"{name}: {argument} is {tensor.dtype} of shape {list(tensor.shape)}; it must be int32 "
            f"or int64 of shape {shape}"
        )


def is_kept_otherwise(tensor: Tensor) -> bool:
    """Whether it is of a subclass that keeps its values in its own way, as torchao's quantised do.

    A DTensor, whose operators this package has rules for, is none.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return False
    return is_traceable_wrapper_subclass(tensor)
