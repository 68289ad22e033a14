"""Modules over the operators of :mod:`pkg.ops`, that take the place of PyTorch's."""

from .linear import Linear

__all__ = ["Linear"]
