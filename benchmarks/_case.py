"""What a benchmark is made of: cases, the results of timing them, and calls for larger data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

# What a call gives.
Returned = Tensor | Sequence[Tensor]
OURS = "pkg"
# Far more than the last cache of a processor: what does not come from memory is not bound by it.
BEYOND_CACHES = 256 << 20


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


@dataclass(frozen=True)
class Case:
    """One input on which peers are compared.

    Attributes:
        name: dtype and sizes, in words.
        peers: what is called, by name; ``pkg`` first, the one that sets the tolerance second.
            A peer that would be far too slow is left out when the case is run.
        exact: the result in float64. A call may give several tensors; each is verified.
        work: what one call does, in units of 1e9: operations, or bytes of input and output.
        unit: of the work a second, ``GFLOP/s`` or ``GB/s``.
        terms: that are summed for one element of the result.
        limit: what bounds the case on a CPU: the arithmetic of a dtype, ``float64``, ``float32``,
            ``bfloat16``, ``float16`` (converted, so float32's) or ``int8``, or ``memory``; None
            where neither does, as in small cases that a cache holds.
        zentorch: the same work by zentorch, where it has it.
        plain: what sets the tolerance in place of the second peer, where that one's result is
            another, being random.
        part: of a result, the one that is exact; all of it where it is None.
        beside: the name of the case whose rate this one's is to be compared with.
        kind: of the work; a peer that is too slow for a case is not tried with more of a kind.
    """

    name: str
    peers: Mapping[str, Callable[[], Returned]]
    exact: Callable[[], Returned]
    work: float
    unit: str
    terms: int = 1
    limit: str | None = None
    zentorch: ForeignCall | None = None
    plain: Callable[[], Returned] | None = None
    part: Callable[[Tensor], Tensor] | None = None
    beside: str | None = None
    kind: str = ""


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
        limit: what the case is held to.
        attainable: units of work a second at that limit, on this machine with these threads; of
            memory, what reading it gave in the same rounds.
        threads: that were used.
        skipped: peers that would have taken far too long.
        beside: the name of the case to compare the rate with.
    """

    operator: str
    case: str
    work: float
    unit: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    limit: str | None = None
    attainable: float | None = None
    threads: int | None = None
    skipped: tuple[str, ...] = ()
    beside: str | None = None

    def rate(self, peer: str) -> float:
        """Units of work a second."""
        return self.work / self.seconds[peer]

    @property
    def share(self) -> float | None:
        """Of the limit, reached by ours."""
        return self.rate(OURS) / self.attainable if self.attainable else None

    @property
    def best_peer(self) -> str | None:
        """The fastest of those that were measured beside ours."""
        others = [peer for peer in self.seconds if peer != OURS]
        return min(others, key=self.seconds.__getitem__, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the best peer ours is."""
        best = self.best_peer
        return self.seconds[best] / self.seconds[OURS] if best else None


def copies_beyond_caches(*tensors: Tensor) -> int:
    """How many copies of tensors are, together, far more than the caches hold; 1 off the CPU."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return math.ceil(BEYOND_CACHES / max(1, size))


def in_turn(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> Callable[[], Any]:
    """A function that calls with the first arguments, then the second, and round again.

    With copies of a tensor it is read from memory each time, as the weights of a model are,
    however large the caches.
    """
    return each_in_turn([partial(function, *each) for each in arguments])


def each_in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that makes the first call, then the second, and round again."""
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)
    return lambda: next(turns)()
