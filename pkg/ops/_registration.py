"""What the operators' registrations share: fakes, gradients and autocast.

Each operator's own module says what it computes; PyTorch keeps what is
registered here for the life of the process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import Function, _SingleLevelFunction

from pkg import _C

from ._call import direct_call, in_order
from ._factors import Unsaved, saving_constant
from ._forward_mode import Tangent, have_tangents, jvp_of, keeping_for_tangents, may_be_forward_mode
from ._strides import result_strides, strides_after_number

# Before 2.13 PyTorch refuses to register what it has on a list. Where this copy was imported before
# and forgotten, it is meant to be replaced.
_registered: set[str] = getattr(torch.library, "_impls", set())
_registered -= {key for key in _registered if key.startswith("pkg/")}

library = torch.library.Library("pkg", "IMPL")

# By operator: what computes a result and records its gradient, with the dispatcher left out.
_recording: dict[str, Callable[..., Any]] = {}
# And what computes it within an autograd function's forward.
_running: dict[str, Callable[..., Any]] = {}

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what an operator's results look like: a decorator.

    ``torch.library.register_fake`` notes where it is called from, for which Python looks through
    every loaded module, once for each file. Called from one file, the import is a quarter shorter.
    What a former import of this copy registered is replaced.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"pkg::{name}", function, allow_override=True)
        return function

    return register


def records_gradients(values: Iterable[object]) -> bool:
    """Whether autograd records a function of these.

    A loop, since ``any()`` of a generator takes longer.
    """
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def reduce_to(gradient: Tensor, like: Tensor | Unsaved) -> Tensor:
    """Sums a gradient over the dimensions that ``like`` was broadcast in, in its dtype."""
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)


def check_one_device(name: str, *tensors: Tensor) -> None:
    """For fake kernels: tensors on meta and on a real device do not mix."""
    torch._check(
        len({tensor.device for tensor in tensors}) == 1,
        lambda: (
            f"{name}: the tensors are on {', '.join(str(t.device) for t in tensors)}; "
            "move them to one device"
        ),
    )


def fake_pointwise(
    name: str, a: Tensor, b: Tensor, dtype: torch.dtype, *, then_number: bool = False
) -> Tensor:
    """The result of a pointwise operator: TensorIterator's shape and strides, and a dtype.

    Args:
        name: The operator, for errors.
        a: The first input.
        b: The second one; ``a`` again where there is none.
        dtype: The result's.
        then_number: Whether PyTorch's way to the result ends with an operator on a
            tensor and a number.
    """
    check_one_device(name, a, b)
    if all(type(number) is int for t in (a, b) for number in (*t.shape, *t.stride())):
        shape = torch.broadcast_shapes(a.shape, b.shape)
        strides = result_strides(a, b)
        if then_number:
            strides = strides_after_number(shape, strides)
        return a.new_empty_strided(shape, strides, dtype=dtype)
    # Sizes that are symbols are left to PyTorch. The strides are those of float32 stand-ins: where
    # dtypes differ, or are half precision, its own meta functions convert and lose the layout.
    stand_ins = (t.new_empty_strided(t.shape, t.stride(), dtype=torch.float32) for t in (a, b))
    return torch.empty_like(torch.mul(*stand_ins), dtype=dtype)


def below_autograd(name: str, operator: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """What an operator's autograd kernel calls: the operator, with nothing recorded.

    Args:
        name: The operator.
        operator: It.
        values: Its arguments.
        options: And those by keyword.

    Raises:
        RuntimeError: As the operator; where DTensor refuses the call, in words.
    """
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*values, **options)
    except RuntimeError as error:
        raise in_words(name, error, [*values, *options.values()]) from error.__cause__


def in_words(name: str, error: RuntimeError, values: Iterable[Any]) -> RuntimeError:
    """What to raise for a call that failed below autograd: DTensor's refusals say what to do.

    Args:
        name: The operator.
        error: What was raised.
        values: The operator's arguments.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    tensors = [value for value in values if isinstance(value, Tensor)]
    if distributed is None or not any(isinstance(each, distributed.DTensor) for each in tensors):
        return error
    if isinstance(error, NotImplementedError):
        return RuntimeError(
            f"{name}: an argument is a DTensor, and DTensor was not told how this operator may "
            "be split; call pkg.integrations.distributed.register() first"
        )
    if "mixed torch.Tensor and DTensor" not in str(error):
        return error
    return RuntimeError(
        f"{name}: some tensors are DTensors and some are not; make all of them DTensors, or none, "
        "by to_local()"
    )


def one_level_function(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Records one node: ``apply`` of an autograd function that no transform looks into.

    Without ``jvp`` it refuses arguments that have tangents.
    """
    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "_compiled_autograd_key": staticmethod(Function._compiled_autograd_key),
    }
    if jvp is not None:
        members["jvp"] = staticmethod(jvp)
    function: Any = type(f"pkg_{name}_", (_SingleLevelFunction,), members)
    apply: Callable[..., Any] = function.apply
    return apply


def register_gradients(
    name: str,
    backward: Callable[..., Any],
    *,
    tangent: Tangent | None = None,
    setup_context: Callable[..., None] | None = None,
    keeps: str | None = None,
    is_product: bool = False,
) -> None:
    """Registers a backward formula that torch.func serves too, and perhaps one of forward mode.

    ``torch.library.register_autograd`` takes the same formulas, but refuses torch.func.grad, and
    drops the tangents of forward mode in silence. So the operator gets an autograd kernel as
    PyTorch's own have: it records at one level and runs the operator at the levels below.

    Args:
        name: The operator's name, without its namespace.
        backward: Takes the context and the gradients of the outputs; returns one
            gradient or None for each positional argument.
        tangent: Takes the arguments by position, the tuple of results, and the tangents of the
            arguments, None where there is none; returns the tangent of the result, or of each,
            None of one that is marked as not differentiable. Without it forward mode is refused.
        setup_context: Takes ``ctx``, ``inputs`` and ``output``, and ``keyword_only_inputs``
            where the operator has such. By default the tensors among the inputs
            are saved.
        keeps: The argument, if there is one, that asks the operator to return what only
            the backward formula wants: it is True wherever a gradient is recorded. Goes
            with a ``setup_context``.
        is_product: Whether the gradient of each of the first two arguments takes the other one,
            and nothing else. Of a call in which one is constant, only what is needed is saved;
            ``backward`` gets both by :func:`factors`.
    """
    arguments = getattr(torch.ops.pkg, name).default._schema.arguments
    defaults = tuple(argument.default_value for argument in arguments)
    positional = sum(not argument.kwarg_only for argument in arguments)
    dispatched = in_order(name)

    def run_below(*values: Any) -> Any:
        # A level of torch.func below this one records for itself, if gradients are enabled, and
        # one of forward mode has its tangents, or refuses, if those are.
        if may_be_forward_mode() and not forward_ad._is_fwd_grad_enabled():
            with forward_ad._set_fwd_grad_enabled(True):
                return run_below(*values)
        with torch.enable_grad():
            return below_autograd(name, dispatched, *values)

    record = _recorder(name, backward, setup_context, keeps, is_product)
    recorded = record(run_below)
    # Made when it is wanted: it is not by most, and takes its share of the import.
    recorded_with_tangents = functools.cache(lambda: record(run_below, tangent))
    _running[name] = direct_call(name, run_below, is_checked=False)
    _recording[name] = record(_running[name])
    _C._set_short_way(name, record=_recording[name])

    def call_or_record(*values: Any) -> Any:
        is_forward_mode = have_tangents(values)
        if not is_forward_mode and not records_gradients(values):
            return below_autograd(name, dispatched, *values)
        apply = recorded_with_tangents() if is_forward_mode else recorded
        if not torch._C._are_functorch_transforms_active():
            return apply(*values)
        with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
            return apply(*values)

    direct = direct_call(name, call_or_record, is_observed=False)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher leaves trailing arguments out that equal their defaults.
        values = args + defaults[len(args) :]
        if kwargs:
            given = (kwargs.get(a.name, a.default_value) for a in arguments[positional:])
            values = values[:positional] + tuple(given)
        return direct(*values)

    library.impl(name, kernel, "Autograd")


def _recorder(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    keeps: str | None,
    is_product: bool,
) -> Callable[..., Callable[..., Any]]:
    """Makes what records a call of that which computes it; the rest is register_gradients()'s."""
    arguments = getattr(torch.ops.pkg, name).default._schema.arguments
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    positional = len(arguments) - len(keywords)
    kept = [argument.name for argument in arguments].index(keeps) if keeps else None

    def forward_and_context(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, *values: Any) -> Any:
            if kept is not None and values[kept] is not True:
                values = (*values[:kept], True, *values[kept + 1 :])
            output = run(*values)
            if keywords:
                named = dict(zip(keywords, values[positional:], strict=True))
                setup_context(ctx, values[:positional], output, named)  # type: ignore[misc]
            else:
                setup_context(ctx, values, output)  # type: ignore[misc]
            return output

        return forward

    def forward_of(run: Callable[..., Any]) -> Callable[..., Any]:
        if setup_context is not None:
            return forward_and_context(run)
        # That of the binding does without Python's frames, a twentieth of a small call.
        return _C._saving_forward(run, saving_constant(run) if is_product else None)

    def padded_backward(ctx: Any, *gradients: Tensor) -> Any:
        result = backward(ctx, *gradients)
        of_inputs = result if isinstance(result, tuple) else (result,)
        return of_inputs + (None,) * len(keywords)

    def record(run: Callable[..., Any], tangent: Tangent | None = None) -> Callable[..., Any]:
        forward, jvp = forward_of(run), None
        if tangent is not None:
            forward, jvp = keeping_for_tangents(forward), jvp_of(tangent)
        return one_level_function(name, forward, padded_backward if keywords else backward, jvp)

    return record


def register_below_autograd(name: str, made_of: str, function: Callable[..., Any]) -> None:
    """Says what a composite operator does where there is nothing but a kernel to enter.

    The dispatcher would enter the operator's Python and come from there to the other operator by
    all its keys, autograd's, written in Python too, among them.

    Args:
        name: The operator's name, without its namespace.
        made_of: The operator that it calls.
        function: Takes what enters that one's kernel, a set of keys for it, and the arguments as
            the composite operator takes them; returns what that returns.
    """
    handle = getattr(torch.ops.pkg, made_of).default._handle
    enter = getattr(handle, "redispatch_boxed", None)
    if enter is not None:
        _C._set_short_way(name, below_autograd=functools.partial(function, enter))


def register_recording(
    name: str, record: Callable[..., Any], *, observed_as: str | None = None
) -> None:
    """Says how an operator without a gradient of its own records one past the dispatcher.

    Args:
        name: The operator's name, without its namespace.
        record: Takes its arguments by position, calls what ``recording`` gives for an operator
            that has a gradient, and returns what the operator returns.
        observed_as: The operator that PyTorch's observers are told of in the place of a
            composite one: the one that has kernels.
    """
    _C._set_short_way(
        name, record=record, observed_as=None if observed_as is None else f"pkg::{observed_as}"
    )


def recording(name: str) -> Callable[..., Any]:
    """What computes an operator's result and records its gradient, with the dispatcher left out."""
    return _recording[name]


def running(name: str) -> Callable[..., Any]:
    """What computes an operator's result in the forward of an autograd function."""
    return _running[name]


def register_lower_precision_autocast(name: str, *, keeps: Sequence[str] = ()) -> None:
    """Under autocast, casts the operator's floating tensors to the autocast dtype.

    The rule of PyTorch's matmul and attention. float64 stays as it is, as there.

    Args:
        name: The operator's name, without its namespace.
        keeps: Names of arguments that stay as they are.
    """
    operator = getattr(torch.ops.pkg, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def register_for(device: str, key: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def autocast(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                castable = (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.dtype != torch.float64
                    and value.device.type == device
                )
                return value.to(dtype) if castable else value

            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(
                    *(
                        value if name in keeps else cast(value)
                        for name, value in zip(names, args, strict=False)
                    ),
                    **{
                        key: value if key in keeps else cast(value) for key, value in kwargs.items()
                    },
                )

        library.impl(name, autocast, key)

    for device, key in _AUTOCAST_KEYS.items():
        register_for(device, key)
    _C._set_short_way(name, has_autocast=True)
