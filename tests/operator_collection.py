"""Finds the operators that are registered, and the test class of each."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

import torch
from operator_tests import OperatorTests

import pkg

FOLDER = Path(__file__).parent / "ops"

INFERENCE_ONLY = frozenset(
    {
        *("add_out", "decode_attention", "pack_linear_weight", "packed_linear"),
        *("pack_tensor_core_tiled_layout", "unpack_tensor_core_tiled_layout"),
        *("dequantize_tensor_core_tiled_layout", "quantize_rowwise"),
        *("rowwise_scaled_linear_s8s4", "rowwise_scaled_linear_s4s4"),
    }
)
"""The public operators that record no gradient."""


@cache
def operator_classes() -> dict[str, type[OperatorTests]]:
    """The test class of each operator in ``tests/ops``, by the operator's bare name."""
    classes: dict[str, type[OperatorTests]] = {}
    for file in sorted(FOLDER.glob("test_*.py")):
        name = f"collected_{file.stem}"
        specification = importlib.util.spec_from_file_location(name, file)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
        members = [member for member in vars(module).values() if isinstance(member, type)]
        for member in members:
            if issubclass(member, OperatorTests) and member is not OperatorTests:
                operator = member.op._schema.name.removeprefix("pkg::")
                assert operator not in classes, f"two test classes for {operator}"
                classes[operator] = member
    return classes


def registered_operators() -> set[str]:
    """Every operator of the namespace, whether or not a line of Python knows of it."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("pkg::") for name in names if name.startswith("pkg::")}


def public_operators() -> list[str]:
    """The operators that are functions of ``pkg.ops``; the others are parts of these."""
    return sorted(registered_operators() & set(pkg.ops.__all__))
