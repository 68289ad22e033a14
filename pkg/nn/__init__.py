"""Modules over the operators of :mod:`pkg.ops`, that take the place of PyTorch's."""

from .int4_linear import Int4Linear
from .linear import Linear
from .lltm import LLTM
from .multihead_attention import MultiheadAttention
from .rowwise_scaled_linear import RowwiseScaledLinear
from .spatial_correlation_sampler import FlattenedCorrelation, SpatialCorrelationSampler

__all__ = [
    "LLTM",
    "FlattenedCorrelation",
    "Int4Linear",
    "Linear",
    "MultiheadAttention",
    "RowwiseScaledLinear",
    "SpatialCorrelationSampler",
]
