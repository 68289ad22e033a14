"""Proof that an operator, of this package or of yours, does all that PyTorch expects of one.

:func:`check_op` takes an operator, :class:`Sample` calls and a plain reference, and checks values,
gradients, layouts, tracing, transforms and errors. :func:`guarded` puts a tensor between sentinels,
for tests of one's own. The tolerances are derived, not chosen: see :mod:`pkg.testing.tolerance`.

Needs nothing but PyTorch; works with any test runner.
"""

from .check import CAPABILITIES, CHECKS, DTYPES, check_op, checks_for
from .layouts import LAYOUTS, Guarded, Layout, expanded, guarded
from .report import OperatorCheckError, Report
from .samples import ErrorSample, Sample, copy_of, same_bits
from .tolerance import RULE, Expected, exactly, expect, expect_beside, expect_of_terms, ulp

__all__ = [
    "CAPABILITIES",
    "CHECKS",
    "DTYPES",
    "LAYOUTS",
    "RULE",
    "ErrorSample",
    "Expected",
    "Guarded",
    "Layout",
    "OperatorCheckError",
    "Report",
    "Sample",
    "check_op",
    "checks_for",
    "copy_of",
    "exactly",
    "expanded",
    "expect",
    "expect_beside",
    "expect_of_terms",
    "guarded",
    "same_bits",
    "ulp",
]
