"""Operators for inference alone: they refuse to record rather than lose a gradient."""

from __future__ import annotations

from typing import Any

import torch

from ._forward_mode import have_tangents
from ._registration import below_autograd, library, records_gradients


def register_inference_only(name: str, instead: str) -> None:
    """Lets an operator refuse, in words, a call whose gradient could be asked for.

    Args:
        name: The operator's name, without its namespace.
        instead: What the message advises.
    """
    operator = getattr(torch.ops.pkg, name).default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if records_gradients(values) or have_tangents(values):
            raise RuntimeError(
                f"{name}: an argument requires grad or has a tangent, and this operator is for "
                "inference alone; "
                f"{instead}"
            )
        return below_autograd(name, operator, *args, **kwargs)

    library.impl(name, kernel, "Autograd")
