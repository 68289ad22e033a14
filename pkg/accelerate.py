"""PyTorch's own CPU operators by this package's kernels, where these are faster.

:func:`accelerate` turns it on for a process; an unchanged model gains, in training as in inference.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from types import CoroutineType, TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import torch
import torch.nn.attention

from . import (
    _accelerate_dropout,
    _accelerate_optimizers,
    _accelerate_routes,
    _accelerate_table,
    _freed_memory,
)
from ._accelerate_counts import Counts

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ROUTES = (_accelerate_dropout.route, _accelerate_optimizers.route)


class _Switch(NamedTuple):
    is_on: bool = False
    is_timed: bool = False
    keeps_memory: bool = False


class _Call(NamedTuple):
    switch: _Switch
    made: weakref.ref[Acceleration]


# What calls of accelerate() said that hold for the process, and the blocks that are open, the
# newest last: it decides. Threads share all of it, since autograd computes gradients in threads of
# its own.
_lock = threading.RLock()
_calls: list[_Call] = []
_open: list[_Block] = []
# What torch.nn.attention keeps of this package's attention while it is the one in use.
_active: AttentionHandle | None = None
_counts: dict[tuple[str, str], Counts] = {}
# Whether the last call turned acceleration off, and freed memory is still kept.
_is_memory_due = False


class Report:
    """What ran in this package's kernels, for how long, and about what that saved.

    Attributes:
        counts: One :class:`~pkg._accelerate_counts.Counts` for each operator and dtype
            that was called, the longest time first.
    """

    def __init__(self, counts: list[Counts]) -> None:
        """Of what was counted."""
        self.counts = sorted(counts, key=lambda each: (-each.seconds, -each.left))

    def __str__(self) -> str:
        """A table, one operator and dtype a row, and their sum."""
        if not self.counts:
            return "pkg.accelerate: none of the operators that it knows was called"
        rows = [
            ("operator", "dtype", "here", "left", "time", "saved, about"),
            *(_row(each.operator, each.dtype, [each]) for each in self.counts),
            _row("total", "", self.counts),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "pkg.accelerate: calls that ran here (of optimizers, steps that ran fused), those left "
            "to PyTorch, time here, and about how much more PyTorch would have taken: that time by "
            "the ratios in this processor's table, which has products, attention and activations"
        ]
        for operator, dtype, *numbers in rows:
            aligned = (text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True))
            lines.append("  ".join((operator.ljust(widths[0]), dtype.ljust(widths[1]), *aligned)))
        return "\n".join(lines)


def _row(operator: str, dtype: str, counts: list[Counts]) -> tuple[str, ...]:
    """A row of a report, of the sum of what was counted."""
    saved = [each.saved for each in counts if each.saved is not None]
    return (
        operator,
        dtype,
        str(sum(each.taken for each in counts)),
        str(sum(each.left for each in counts)),
        _milliseconds(sum(each.seconds for each in counts)),
        _milliseconds(sum(saved)) if saved else "-",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


class _Block:
    """A block that is open, and what others are to report that was counted before it."""

    def __init__(self, switch: _Switch) -> None:
        self.switch = switch
        self.set_aside: list[Counts] = []


class Acceleration:
    """What :func:`accelerate` returns: a context, a decorator, and the report."""

    def __init__(self, switch: _Switch) -> None:
        """Made by :func:`accelerate`."""
        self._switch = switch
        self._blocks: list[_Block] = []

    def __repr__(self) -> str:
        """What was asked for, and whether PyTorch's operators are led here now."""
        return f"<pkg.accelerate({self._switch.is_on}): now {'on' if _newest().is_on else 'off'}>"

    def __enter__(self) -> Acceleration:
        """On, or off, until the end of the block.

        Raises:
            RuntimeError: it is entered in a region that ``torch.compile`` compiles.
        """
        _refuse_to_be_compiled()
        block = _Block(self._switch)
        try:
            with _lock:
                self._take_back()
                self._begin(block)
            return self
        except BaseException:  # of a signal handler
            with _lock:
                self._take_back()
                self._abandon(block)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As it was before the block."""
        with _lock:
            block = self._blocks[-1]
            try:
                self._close(block)
            except BaseException:  # of a signal handler
                self._abandon(block)
                raise
            if not self._switch.is_timed:
                return
            report = self.report()
            _add(block.set_aside)
        print(report)

    def __call__(self, function: _Function) -> _Function:
        """A function that runs accelerated: a decorator.

        Of a generator function each step does; what its caller does in between does not.

        Raises:
            TypeError: it is a class, a module, or an ``async def``; or a generator function, and
                there is to be a report. So of an object whose ``__call__`` is one.
        """
        with _lock:
            self._take_back()
            settle()
        _refuse_what_cannot_be_wrapped(function, self._switch.is_timed)

        def block() -> Acceleration:  # which each call opens anew
            return Acceleration(self._switch)

        if _of_kind(inspect.isgeneratorfunction, function):
            return functools.wraps(function)(_by_steps(function, block))  # type: ignore[return-value]

        @functools.wraps(function)
        def accelerated(*args: Any, **kwargs: Any) -> Any:
            with block():
                result = function(*args, **kwargs)
            if isinstance(result, CoroutineType):  # of another decorator's function
                result.close()
                _refuse_async(function)
            return result

        return accelerated  # type: ignore[return-value]

    def _begin(self, block: _Block) -> None:
        if self._switch.is_timed:
            block.set_aside = _take()
        self._blocks.append(block)
        _open.append(block)
        settle()

    def _close(self, block: _Block) -> None:
        for blocks in (self._blocks, _open):
            blocks[:] = [each for each in blocks if each is not block]
        settle()
        _give_memory_back_if_due()

    def _abandon(self, block: _Block) -> None:
        """Closes a block without a report, however far it is begun or closed."""
        self._close(block)
        _add(block.set_aside)

    def _hold(self) -> None:
        """For the process, until it is taken back."""
        try:
            _calls.append(_Call(self._switch, weakref.ref(self)))
            settle()
        except BaseException:  # of a signal handler
            self._take_back()
            settle()
            raise

    def _take_back(self) -> None:
        """What the call of accelerate() did; a block or a function does it in its place."""
        global _is_memory_due
        left = [each for each in _calls if each.made() is not self]
        if len(left) < len(_calls):
            _is_memory_due = False
        _calls[:] = left

    def report(self) -> Report:
        """What was counted since acceleration was turned on, or since the last report."""
        with _lock:
            return Report(_take())


def _refuse_what_cannot_be_wrapped(function: Callable[..., Any], is_timed: bool) -> None:
    """Raises a TypeError where a block around calls is not what the user means."""
    if inspect.isclass(function):
        raise TypeError(
            f"pkg.accelerate: {function.__qualname__} is a class, which it does not wrap: decorate "
            "those of its methods that compute"
        )
    if isinstance(function, staticmethod):
        raise TypeError(
            f"pkg.accelerate: {_name(function)} is a staticmethod, and a function around it would "
            "be a method: write @staticmethod above @pkg.accelerate"
        )
    if isinstance(function, torch.nn.Module):
        raise TypeError(
            f"pkg.accelerate: {type(function).__qualname__} is a module, and a function around it "
            "would be none: call pkg.accelerate() before it runs, write `with pkg.accelerate():` "
            "around what runs it, or decorate its forward"
        )
    waits = _of_kind(inspect.iscoroutinefunction, function)
    waits = waits or _of_kind(inspect.isasyncgenfunction, function)
    if waits:
        _refuse_async(waits)
    steps = _of_kind(inspect.isgeneratorfunction, function)
    if is_timed and steps:
        raise TypeError(
            f"pkg.accelerate: {_name(steps)} is a generator function, each step of which would "
            "print a report: leave report out, and write `with pkg.accelerate(report=True):` "
            "around the loop over it"
        )


def _refuse_async(function: Callable[..., Any]) -> NoReturn:
    raise TypeError(
        f"pkg.accelerate: {_name(function)} is an async function, which it does not wrap: it would "
        "be on for whatever else runs while that waits. Write `with pkg.accelerate():` around what "
        "computes in it"
    )


def _of_kind(
    is_of_kind: Callable[[Any], bool], function: Callable[..., Any]
) -> Callable[..., Any] | None:
    """What is of a kind in a call: the function, an object's ``__call__``, a module's ``forward``.

    None where nothing is. A module comes here within a partial function alone.
    """
    while isinstance(function, functools.partial):
        function = function.func
    called = [function, type(function).__call__]
    if isinstance(function, torch.nn.Module):
        called.append(function.forward)
    return next((each for each in called if is_of_kind(each)), None)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _by_steps(
    function: Callable[..., Generator[Any, Any, Any]], block: Callable[[], Acceleration]
) -> Callable[..., Generator[Any, Any, Any]]:
    """A generator function each step of which runs in a block of its own."""

    def steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        resume = functools.partial(generator.send, None)
        while True:
            try:
                with block():
                    value = resume()
            except StopIteration as end:
                return end.value
            try:
                sent = yield value
            except GeneratorExit:
                with block():
                    generator.close()
                raise
            except BaseException as error:
                resume = functools.partial(generator.throw, error)
            else:
                resume = functools.partial(generator.send, sent)

    return steps


@overload
def accelerate(
    on: bool = True, *, report: bool = False, keep_memory: bool = True
) -> Acceleration: ...
@overload
def accelerate(on: _Function, *, report: bool = False, keep_memory: bool = True) -> _Function: ...
def accelerate(on: Any = True, *, report: bool = False, keep_memory: bool = True) -> Any:
    """Routes PyTorch's own CPU operators to this package's kernels, where these are faster.

    ``mm``, ``bmm``, ``addmm``, ``baddbmm``, their forms with ``out``, ``_addmm_activation`` and
    ``_int_mm`` are taken over, and with them ``@``, ``nn.Linear``, ``einsum``, attention and what
    ``torch.compile`` makes of them, forward and backward, in float64, float32, float16, bfloat16
    and int8. A call goes here where a table says that it is faster, measured on this kind of
    processor; every other goes to PyTorch's kernel untouched, with its errors. None of this
    happens on import. Results differ as those of two kernels do: in rounding. Where a key that
    causality or a mask hides is NaN or infinite, so may be the result, as by PyTorch's own formula
    without a fused kernel.

    The inference path of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` attends by these
    kernels too: where the table says so, for sequences of 128 tokens or more; always where the
    encoder has made a nested tensor of sequences with padding, of which nothing is computed here.

    ``gelu``, exact and by ``tanh``, and ``silu`` with their gradients are taken over in floating
    dtypes, from PyTorch 2.13 on.

    Convolutions in half precision that PyTorch has no kernel of oneDNN for (float16 on most
    processors), of any number of dimensions and groups, transposed or not, are converted, computed
    by its kernel of float32 and rounded once: four to thirty times as fast, and more exact. That is
    so from PyTorch 2.13 on.

    ``torch.nn.attention.varlen.varlen_attn``, for which PyTorch has no kernel on the CPU, runs here
    always, with everything that it takes; keys in pages (``block_table``) are copied out of them.
    Attention alone can be had by ``torch.nn.attention.activate_flash_attention_impl("pkg")``, which
    asks no table, until ``restore_flash_attention_impl()``. The two do not touch one another:
    attention runs here while either says so.

    Where the package has no table for this processor it is measured, once, which takes a minute,
    and kept (``python -m pkg tune``; :mod:`pkg.tune`); ``python -m pkg env`` names the table in
    use. What was measured with one thread says nothing of several: for these the first call of this
    with several takes the package's table, or measures again where it has none, and until then
    operators with several are left to PyTorch.

    Dropout's ``bernoulli_`` is drawn by all threads, where PyTorch draws it element by element,
    which is everywhere but on Intel's processors: elements and generator are to the last bit what
    they would be.

    Steps of ``torch.optim``'s Adam, AdamW, SGD with momentum and Adagrad run by PyTorch's own fused
    kernels, which PyTorch takes only where ``fused=True`` asks for them: two to five times as fast.
    An optimizer that was made with ``fused``, ``foreach`` or ``differentiable`` keeps to that; its
    groups and ``state_dict`` are as they would be without.

    Memory that is freed is kept for the next tensor, where glibc would return it to the system and
    have it cleared anew, at every step what is larger than 32 MiB at the least: a training step of
    a GPT-2 with its whole vocabulary is twice as fast for it alone. The process then holds what it
    held at its peak until ``pkg.accelerate(False)`` gives back what is free; the end of a block
    keeps it. Where large blocks of random sizes come and go that is 40 to 70 % more than without.

    It holds for the process, with all its threads: autograd uses threads of its own. Of several
    blocks that are open at a time the one that was opened last decides.

    Args:
        on: False to leave all to PyTorch again. A function: it is wrapped, so that it runs
            accelerated, which makes ``@pkg.accelerate`` a decorator; of a generator function, each
            of its steps.
        report: Print at the end of the block, or of the process, what ran where, for how long, and
            what that saved, which is an estimate: the time here, by the table's ratios.
        keep_memory: False to leave the C library's ways with freed memory as they are; they are
            also left where the user has set them (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_MAX_``,
            ``GLIBC_TUNABLES`` and so on), and where it is not glibc.

    Returns:
        An :class:`Acceleration`: a context manager and decorator; in a ``with`` statement what was
        before is restored at its end. Of a function, the wrapped function.

    Raises:
        TypeError: ``on`` is neither a bool nor a function; or it is a class, a module, a
            ``staticmethod`` object, or an ``async def``; or a generator function, with ``report``.
        RuntimeError: it, or a function that it wrapped, is called in a region that
            ``torch.compile`` compiles. Without ``fullgraph`` the graph ends before that function,
            which is compiled by itself and runs accelerated.

    Example:
        >>> with pkg.accelerate(report=True):  # doctest: +SKIP
        ...     train(model)
    """
    global _is_memory_due
    _refuse_to_be_compiled()
    if not isinstance(on, bool) and not callable(on):
        raise TypeError(
            f"pkg.accelerate: on is of type {type(on).__name__}; it must be a bool, or a function "
            "to wrap"
        )
    if callable(on):
        _refuse_what_cannot_be_wrapped(on, report)
    with _lock:
        if on:
            _accelerate_table.use()
            _accelerate_routes.register()
            _accelerate_optimizers.register()
        switch = _Switch(bool(on), bool(on) and report, bool(on) and keep_memory)
        if callable(on):
            return Acceleration(switch)(on)
        replaced = Report(_take()) if _base().is_timed else None
        if switch.is_timed and not any(each.switch.is_timed for each in _open):
            _take()  # what nobody is to report
        made = Acceleration(switch)
        _forget_replaced()
        made._hold()
        # Of a call in a block that is on, once that has ended.
        _is_memory_due = not on
        _give_memory_back_if_due()
    if replaced is not None:
        print(replaced)
    return made


def _refuse_to_be_compiled() -> None:
    """Raises a RuntimeError in a graph, which would have what is switched while it is traced."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "pkg.accelerate is called in a region that torch.compile compiles; switch outside of "
            "it, or wrap the function that torch.compile returns: what is compiled is accelerated "
            "as it runs"
        )


def settle() -> None:
    """Turns the kernels on or off, as the newest open block says, or the last call."""
    newest = _newest()
    is_timed = _is_timed()
    attention = _accelerate_routes.ATTENTION_ALWAYS if _active is not None else None
    _accelerate_routes.switch(newest.is_on, is_timed, attention)
    for each in _ROUTES:
        each.switch(newest.is_on, is_timed)
    # At the end of a block it stays kept: the next one, or call of a decorated function, would have
    # every page cleared anew.
    if newest.keeps_memory:
        _freed_memory.keep()


def _give_memory_back_if_due() -> None:
    global _is_memory_due
    if _is_memory_due and not _newest().is_on:
        _is_memory_due = False
        _freed_memory.give_back()


def _newest() -> _Switch:
    return _open[-1].switch if _open else _base()


def _is_timed() -> bool:
    return _base().is_timed or any(each.switch.is_timed for each in _open)


def _base() -> _Switch:
    """What holds where no block is open, and after all blocks."""
    return _calls[-1].switch if _calls else _Switch()


def _forget_replaced() -> None:
    """Forgets the calls before the newest of those that nobody can take back any more."""
    for index in reversed(range(len(_calls))):
        if _calls[index].made() is None:
            del _calls[:index]
            return


class AttentionHandle:
    """What PyTorch keeps while this package's attention is the active one."""

    def remove(self) -> None:
        """As it was: attention runs where :func:`accelerate` says."""
        global _active
        with _lock:
            if _active is self:
                _active = None
                settle()


def _activate_attention() -> AttentionHandle:
    """What ``torch.nn.attention.activate_flash_attention_impl("pkg")`` calls.

    Attention on the CPU, dense and ``varlen_attn``'s, runs in this package's kernels wherever
    these can take it, whatever :func:`accelerate` says and without a table.
    """
    global _active
    with _lock:
        _accelerate_routes.register()
        _active = AttentionHandle()
        settle()
        return _active


# A name in a dictionary of a part of PyTorch's that may still change.
if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl("pkg", register_fn=_activate_attention)


@atexit.register
def _say_last_words() -> None:
    if _base().is_timed:
        print(Report(_take()))


def _begin_in_child() -> None:
    """Leaves what was counted before a fork to the reports of the parent."""
    global _lock
    _lock = threading.RLock()  # another of the parent's threads may hold it, which is not here
    if _is_timed():
        _take()
        for block in _open:
            block.set_aside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


def collect() -> None:
    """Keeps for the reports what was counted so far, before somebody else counts."""
    with _lock:
        _add(_accelerate_routes.take_counts())
        for each in _ROUTES:
            _add(each.take())


def _take() -> list[Counts]:
    """What was counted and is in no report; it is in none from now on."""
    collect()
    found = list(_counts.values())
    _counts.clear()
    return found


def _add(found: Iterable[Counts]) -> None:
    for counts in found:
        known = _counts.setdefault((counts.operator, counts.dtype), counts)
        if known is not counts:
            known.taken += counts.taken
            known.left += counts.left
            known.seconds += counts.seconds
            if known.saved is not None and counts.saved is not None:
                known.saved += counts.saved
