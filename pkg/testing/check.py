"""Everything that an operator must do, proved in one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from .gradients import check_gradcheck, check_gradgradcheck, check_gradients, check_jvp
from .report import Recorder, Report
from .samples import ErrorSample, Sample
from .subject import Function, Subject
from .tracing import (
    check_compile,
    check_compile_dynamic,
    check_export,
    check_fake,
    check_inductor,
    check_meta,
)
from .transforms import AUTOCAST_POLICIES, check_autocast, check_func, check_vmap
from .values import (
    check_determinism,
    check_errors,
    check_layouts,
    check_registration,
    check_samples,
    check_threads,
    check_values,
)

_CHECKS: dict[str, Callable[[Subject, Recorder], None]] = {
    "samples": check_samples,
    "registration": check_registration,
    "values": check_values,
    "layouts": check_layouts,
    "determinism": check_determinism,
    "threads": check_threads,
    "errors": check_errors,
    "gradients": check_gradients,
    "gradcheck": check_gradcheck,
    "gradgradcheck": check_gradgradcheck,
    "jvp": check_jvp,
    "fake": check_fake,
    "meta": check_meta,
    "compile": check_compile,
    "compile_dynamic": check_compile_dynamic,
    "inductor": check_inductor,
    "export": check_export,
    "autocast": check_autocast,
    "vmap": check_vmap,
    "func": check_func,
}

CHECKS: tuple[str, ...] = tuple(_CHECKS)
"""The names of all checks, in the order in which they run."""

CAPABILITIES: dict[str, tuple[str, ...]] = {
    "gradients": ("gradcheck", "gradgradcheck", "jvp", "func"),
    "gradcheck": ("gradcheck", "gradgradcheck", "jvp"),
    "func": ("func",),
    "gradgradcheck": (),
    "vmap": (),
    "autocast": ("autocast",),
    "export": ("export",),
    "compile": ("compile", "compile_dynamic", "inductor", "export"),
    "families": ("compile_dynamic",),
    "empty": (),
    "errors": ("errors",),
}
"""What ``without`` may name, and the checks that fall away with it. A check that stays asserts the
opposite: an operator without gradients must refuse to give any rather than give wrong ones."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that an operator is checked in unless said otherwise."""


def check_op(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket,
    samples: Iterable[Sample],
    *,
    reference: Function,
    errors: Iterable[ErrorSample] = (),
    function: Function | None = None,
    function_is_operator: bool = True,
    dtypes: Iterable[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
    mutates: Collection[str] = (),
    nondifferentiable_inputs: Collection[str] = (),
    nondifferentiable_outputs: Collection[int] = (),
    structural_inputs: Collection[str] = (),
    autocast: str = "unchanged",
    max_ulps: float | None = None,
    without: Collection[str] = (),
    checks: Iterable[str] = CHECKS,
) -> Report:
    """Prove that an operator does all that a PyTorch operator should.

    The checks, by name:

    - ``samples``: the samples include an empty tensor, a family of sizes and a wrong call, and
      ``mutates`` says what the schema says.
    - ``registration``: ``torch.library.opcheck``; its trace by AOTAutograd with dynamic shapes for
      one sample of each family, and one without.
    - ``values``: every output agrees with ``reference`` in every dtype, within the tolerance that
      :mod:`pkg.testing.tolerance` derives; the same bits through the dispatcher and in inference
      mode.
    - ``layouts``: the same for strided, transposed, padded, misaligned and expanded tensors, all
      of them alike in every dtype, one at a time in one dtype. Each lies in a buffer of sentinels:
      no argument may be modified, nor a byte around one.
    - ``determinism``, ``threads``: the same bits again, and from several Python threads at once.
    - ``errors``: wrong arguments raise the right error in the right words.
    - ``gradients``: the reference's, in every dtype, for every choice of inputs that require grad;
      of more than four for those of one, two and all, as :mod:`pkg.testing.choices` says.
    - ``gradcheck``, ``gradgradcheck``: finite differences in float64.
    - ``jvp``: forward mode, of the operator and of its gradients, gives matching tangents or
      refuses them in words; PyTorch lets an operator drop them in silence.
    - ``fake``, ``meta``: shape, dtype, strides and device without values.
    - ``compile``, ``compile_dynamic``, ``inductor``, ``export``: ``fullgraph=True``, static and
      dynamic shapes, forward and backward; one dynamic program serves a whole family.
    - ``autocast``: the declared policy, bit for bit, for bfloat16 and float16.
    - ``vmap``, ``func``: the same choices of batched tensors, nested too; ``grad``, ``vjp`` and
      per-sample gradients.

    Args:
        op: the operator, as ``torch.ops.namespace.name.default``.
        samples: calls that must succeed; they are moved to ``device``.
        reference: a plain function of the same arguments that is obviously right, in PyTorch, able
            to run in float64. Where the operator mutates an argument, so does the reference.
        errors: calls that must fail; they are moved to ``device`` unless they say otherwise.
        function: the public Python function, where there is one; ``op`` itself if not given.
        function_is_operator: whether ``function`` gives what ``op`` gives. Not where it computes
            some arguments from the others before it calls ``op``, as for the backward pass of an
            operator, whose outputs it takes: they cannot be chosen freely.
        dtypes: what float64 tensors of the samples are converted to.
        device: where to run.
        mutates: names of the arguments that the operator writes to.
        nondifferentiable_inputs: names of floating-point arguments that no gradient flows to.
        nondifferentiable_outputs: positions of floating-point outputs that none flows from.
        structural_inputs: names of arguments whose values say how the other tensors are to be read,
            as where the sequences of a packed batch begin: they come in every layout, but never
            with values other than a sample's.
        autocast: what autocast does: ``"unchanged"``, ``"lower"`` (casts to the autocast dtype),
            ``"float32"``, or ``"widest"`` (the widest dtype among the arguments).
        max_ulps: a stricter bound on every element of the outputs, in units in the last place.
        without: capabilities that the operator lacks, among :data:`CAPABILITIES`. Nothing else is
            ever left out: a check that finds nothing to run fails.
        checks: run these alone, so that a test suite can spread them.

    Returns:
        How often each check ran.

    Raises:
        OperatorCheckError: at least one check failed. All checks run first; the message names each
            that failed with its sample and dtype.

    Example:
        >>> @torch.library.custom_op("docs::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> _ = double.register_fake(torch.empty_like)
        >>> double.register_autograd(lambda ctx, grad: grad * 2)
        >>> report = check_op(
        ...     torch.ops.docs.double.default,
        ...     [Sample((torch.randn(3, 4).double(),)), Sample((torch.randn(0, 4).double(),))],
        ...     reference=lambda x: x + x,
        ...     max_ulps=0.5,
        ...     without={"families", "errors"},
        ...     checks=["samples", "values", "gradcheck"],
        ... )
        >>> print(report)
        docs::double on cpu: samples 4, values 8, gradcheck 1; without errors, families
    """
    overload = op if isinstance(op, torch._ops.OpOverload) else op.default
    target = torch.device(device)
    subject = Subject(
        op=overload,
        function=function or overload,
        function_is_operator=function_is_operator,
        reference=reference,
        samples=[sample.map_tensors(lambda tensor: tensor.to(target)) for sample in samples],
        errors=[wrong.to(target) for wrong in errors],
        dtypes=tuple(dtypes),
        device=target,
        mutates=tuple(mutates),
        nondifferentiable_inputs=tuple(nondifferentiable_inputs),
        nondifferentiable_outputs=tuple(nondifferentiable_outputs),
        structural_inputs=tuple(structural_inputs),
        absent=tuple(sorted(without)),
        autocast=autocast,
        max_ulps=max_ulps,
    )
    selected = list(checks)
    _require_known("checks", selected, CHECKS)
    _require_known("without", subject.absent, CAPABILITIES)
    _require_known("autocast", [autocast], AUTOCAST_POLICIES)
    names = {argument.name for argument in overload._schema.arguments}
    _require_known("nondifferentiable_inputs", subject.nondifferentiable_inputs, names)
    _require_known("structural_inputs", subject.structural_inputs, names)

    recorder = Recorder(Report(subject.name, str(target), absent=subject.absent))
    remaining = checks_for(subject.absent)
    for name in selected:
        if name not in remaining:
            continue
        _CHECKS[name](subject, recorder)
        if not recorder.report.runs[name]:
            with recorder.running(name, "none"):
                raise AssertionError("no sample is fit for this check, so nothing was proved")
    recorder.raise_failures()
    return recorder.report


def checks_for(without: Collection[str] = ()) -> list[str]:
    """The checks that an operator lacking these capabilities goes through.

    Example:
        >>> set(CHECKS).difference(checks_for({"autocast", "export"})) == {"autocast", "export"}
        True
    """
    left_out = {check for capability in without for check in CAPABILITIES[capability]}
    return [check for check in CHECKS if check not in left_out]


def _require_known(argument: str, given: Iterable[Any], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{argument} names {unknown}; known are {sorted(known)}")
