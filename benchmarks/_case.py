"""What a benchmark is made of: cases, the results of timing them, and calls for larger data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.benchmark.utils.timer import timer

from pkg.testing import Sample

from ._limits import beyond_caches

# What a call gives.
Returned = Tensor | Sequence[Tensor]
OURS = "pkg"


@dataclass(frozen=True)
class ForeignCall:
    """A call of zentorch, which is timed in a process of its own, on tensors made there.

    Attributes:
        operator: in ``torch.ops.zentorch``.
        arguments: tensors, of which shape, strides and dtype are sent, and numbers.
        keywords: likewise, and strings.
        copies: of the tensors, to be used in turn, as with :func:`in_turn`.
    """

    operator: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1


class Reference:
    """What a result has to be: a plain function in PyTorch, and the arguments it is called with.

    Called as it is, it gives plain PyTorch's result, with its floating-point tensors in float64 the
    exact one. It has to find all tensors that it depends on among its arguments: they are also
    moved by a unit in the last place, as :mod:`pkg.testing.tolerance` says.
    """

    def __init__(self, function: Callable[..., Returned], *args: Any, **kwargs: Any) -> None:
        """Of a function of tensors, to be called with these.

        Args:
            function: in PyTorch, obviously right, able to run in float64.
            args: positional; a floating dtype among them becomes float64 for the exact result.
            kwargs: keyword.
        """
        self._function = function
        self.sample = Sample(args, kwargs)

    def evaluate(self, sample: Sample) -> list[Tensor]:
        """Call the function with the arguments of a sample."""
        results: list[Tensor] = pytree.tree_leaves(self._function(*sample.args, **sample.kwargs))
        return results


@dataclass(frozen=True)
class Case:
    """One input on which peers are compared.

    Attributes:
        name: dtype and sizes, in words.
        peers: what is called, by name; ``pkg`` first, second the one whose operators the reference
            is made of. A peer that would be far too slow is left out when the case is run.
        exact: what the result has to be, by a :class:`Reference`; or a function that gives it in
            float64, where the result of the second peer is plain PyTorch's. A call may give several
            tensors; each is verified.
        work: what one call does, in units of 1e9: operations, or bytes of input and output.
        unit: of the work a second, ``GFLOP/s`` or ``GB/s``.
        terms: that are summed for one element of the result; None for a whole model, where the
            result of the second peer alone tells what error is plain.
        limit: what bounds the case on a CPU, one of ``_limits.WAYS``: an arithmetic, or ``memory``;
            None where neither does, as in small cases that a cache holds. A case of memory has to
            go round copies that no cache holds (:func:`copies_beyond_caches`, :func:`in_turn`);
            where it does not, it is held to nothing.
        zentorch: the same work by zentorch, where it has it.
        part: of our result, the one that is verified, or what is made of it; all of it where it is
            None.
        beside: the name of the case whose rate this one's is to be compared with.
        kind: of the work; a peer that is too slow for a case is not tried with more of a kind.
        compiles: whether ``torch.compile`` of the second peer may be one.
    """

    name: str
    peers: Mapping[str, Callable[[], Returned]]
    exact: Reference | Callable[[], Returned]
    work: float
    unit: str
    terms: int | None = 1
    limit: str | None = None
    zentorch: ForeignCall | None = None
    part: Callable[[Tensor], Tensor] | None = None
    beside: str | None = None
    kind: str = ""
    compiles: bool = True

    @property
    def from_memory(self) -> bool:
        """Whether what it reads and writes in all is far more than the caches hold."""
        calls = getattr(self.peers[OURS], "calls", [None])
        return round(self.work * 1e9) * len(calls) >= beyond_caches()


@dataclass(frozen=True)
class Result:
    """The times of a case.

    Attributes:
        operator: its name.
        case: its name.
        work: of a call, as in the case.
        unit: of the work a second.
        seconds: a call, by peer: the median of the rounds.
        spread: half of the middle spread of the rounds, by peer.
        ratios: a peer's time divided by ours of the same round: the quartiles of the rounds, by
            peer.
        limit: what the case is held to.
        attainable: units of work a second at that limit, on this machine with these threads,
            measured in the same rounds.
        threads: that were used.
        skipped: peers that were not timed, and why: ``skipped: ...`` or ``refused: ...``.
        beside: the name of the case to compare the rate with.
        wrong: what is wrong with our result, which is not timed then; None where nothing is.
        unheld: why the case is held to no limit, where it is not.
        others: the share of the machine's processors that other processes, and other systems on
            the same machine, used meanwhile; None where that is not known.
    """

    operator: str
    case: str
    work: float
    unit: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    limit: str | None = None
    attainable: float | None = None
    threads: int | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    beside: str | None = None
    wrong: str | None = None
    unheld: str | None = None
    others: float | None = None

    def rate(self, peer: str) -> float:
        """Units of work a second."""
        return self.work / self.seconds[peer]

    @property
    def share(self) -> float | None:
        """Of the limit, reached by ours."""
        if not self.attainable or OURS not in self.seconds:
            return None
        return self.rate(OURS) / self.attainable

    @property
    def best_peer(self) -> str | None:
        """The fastest of those that were measured beside ours."""
        others = [peer for peer in self.seconds if peer != OURS]
        return min(others, key=self.seconds.__getitem__, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the best peer ours is."""
        best = self.best_peer
        if best is None or OURS not in self.seconds:
            return None
        return self.seconds[best] / self.seconds[OURS]


def copies_beyond_caches(*tensors: Tensor, used: int | None = None) -> int:
    """How many copies of tensors are, together, far more than the caches of their device hold.

    Args:
        tensors: that are to be copied.
        used: bytes that a call reads and writes, where they are not those of the tensors: what it
            writes counts too, since results are kept as long as the copies (:func:`in_turn`).
    """
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None and device.type != "cuda":
        return 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return math.ceil(beyond_caches(device) / max(1, size if used is None else used))


def in_turn(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> Callable[[], Any]:
    """A function that calls with the first arguments, then the second, and round again.

    With copies of a tensor it is read from memory each time, as the weights of a model are,
    however large the caches.
    """
    return each_in_turn([partial(function, *each) for each in arguments])


class InTurn:
    """Makes the first of some calls, then the second, and round again.

    A result is kept until its call is made again: or each would be written where the one before it
    was, in a cache.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Of these calls."""
        self.calls = calls
        self._results: list[Any] = [None] * len(calls)
        self._turns = itertools.cycle(range(len(calls)))

    def begin_at(self, share: float) -> None:
        """Make next the call behind such a share of them, from 0 to below 1."""
        first = int(share * len(self.calls))
        self._turns = itertools.cycle([*range(first, len(self.calls)), *range(first)])

    def make_all(self, seconds: float) -> None:
        """Make each call twice, if they do not take longer than that.

        Memory that was written a moment ago is read at its rate from the third time on: caches
        have yet to write it back, and a virtual machine's host gathers its pages.
        """
        end = timer() + seconds
        for _ in range(2 * len(self.calls)):
            self()
            if timer() > end:
                break

    def __call__(self) -> Any:
        """Make the next call."""
        turn = next(self._turns)
        self._results[turn] = self.calls[turn]()
        return self._results[turn]


def each_in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that makes the first call, then the second, and round again."""
    return calls[0] if len(calls) == 1 else InTurn(calls)
