"""Control flow of a kernel: its loops, and the main one.

Loops are found as compilers find them, from dominators (Aho, Lam, Sethi, Ullman, "Compilers", 9.6):
ptxas places rare blocks of a loop behind the kernel's end, so a branch backwards does not make one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from cuda_sass import Code, Instruction

Blocks = frozenset[int]  # by their numbers
Work = Callable[[Sequence[Instruction]], float]  # arithmetic that a warp does in instructions


# A call of a label, not of a function's name, is how ptxas leaves some loops.
JUMPS = ("BRA", "BRX", "JMP", "JMX", "CALL")
ENDS = ("EXIT", "RET", "KILL")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop: its instructions without those of loops inside it, and the way round it.

    ``way`` are the instructions of the path that does most arithmetic, and of those the shortest:
    branches to rare cases are not taken on it. ``around`` is what the loop next outside does
    besides, ``inside`` are the loops within it, by the blocks that they begin with.
    """

    instructions: tuple[Instruction, ...]
    way: tuple[Instruction, ...]
    around: tuple[Instruction, ...] = ()
    inside: frozenset[int] = frozenset()


class Flow:
    """The basic blocks of a kernel and the ways between them, from its first instruction."""

    def __init__(self, code: Code) -> None:
        self.code = code
        starts = {0, *code.labels.values()}
        for number, each in enumerate(code.instructions):
            if each.base in (*JUMPS, *ENDS, "BSYNC"):
                starts.add(number + 1)
        ordered = sorted(start for start in starts if start < len(code.instructions))
        bounds = [*ordered, len(code.instructions)]
        self.blocks = [range(a, b) for a, b in itertools.pairwise(bounds)]
        self.number_of = {block.start: number for number, block in enumerate(self.blocks)}
        self.successors = [self._successors(number) for number in range(len(self.blocks))]
        self.order = self._reverse_postorder()
        self.predecessors: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for successor in self.successors[block]:
                self.predecessors[successor].append(block)
        self.dominator = self._dominators()

    def _successors(self, number: int) -> list[int]:
        block = self.blocks[number]
        last = self.code.instructions[block[-1]]
        following = [number + 1] if number + 1 < len(self.blocks) else []
        if last.base in ENDS:
            return following if last.predicate else []
        if last.base == "BSYNC":
            return self._meeting_point(block[-1]) or following
        if last.base not in JUMPS or (last.base == "CALL" and not last.targets):
            return following
        found = [*self._blocks_of(last.targets), *(following if last.is_conditional else [])]
        return list(dict.fromkeys(found))

    def _blocks_of(self, labels: Iterable[str]) -> list[int]:
        places = [self.code.labels[label] for label in labels if label in self.code.labels]
        return [self.number_of[place] for place in places if place in self.number_of]

    def _meeting_point(self, position: int) -> list[int]:
        """Where the threads of a BSYNC go on: at the label of the BSSY before it."""
        barrier = self.code.instructions[position].operands.split(",")[0]
        for each in reversed(self.code.instructions[:position]):
            if each.base == "BSSY" and each.operands.split(",")[0] == barrier:
                return self._blocks_of(each.targets)
        return []

    def _reverse_postorder(self) -> list[int]:
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.successors[0]))] if self.blocks else []
        while stack:
            block, rest = stack[-1]
            for successor in rest:
                if successor not in seen:
                    seen.add(successor)
                    stack.append((successor, iter(self.successors[successor])))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]

    def _dominators(self) -> dict[int, int]:
        """Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", 2001."""
        place = {block: number for number, block in enumerate(self.order)}
        dominator = {block: block for block in self.order[:1]}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [each for each in self.predecessors[block] if each in dominator]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        while place[new] > place[other]:
                            new = dominator[new]
                        while place[other] > place[new]:
                            other = dominator[other]
                if dominator.get(block) != new:
                    dominator[block] = new
                    changed = True
        return dominator

    def dominates(self, above: int, below: int) -> bool:
        """Whether every way to ``below`` leads through ``above``."""
        while below != above and self.dominator[below] != below:
            below = self.dominator[below]
        return below == above

    def loops(self) -> dict[int, Blocks]:
        """The blocks of each loop by the block that it begins with."""
        found: dict[int, set[int]] = {}
        for block in self.order:
            for header in self.successors[block]:
                if self.dominates(header, block):
                    inside = found.setdefault(header, {header})
                    waiting = [block]
                    while waiting:
                        each = waiting.pop()
                        if each not in inside:
                            inside.add(each)
                            waiting += self.predecessors[each]
        return {header: frozenset(inside) for header, inside in found.items()}

    def instructions_of(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """The instructions of blocks, as they stand in the code."""
        return tuple(
            self.code.instructions[place]
            for block in sorted(blocks, key=lambda each: self.blocks[each].start)
            for place in self.blocks[block]
        )

    def way_round(self, header: int, inside: Blocks, own: Blocks, work: Work) -> list[int]:
        """The blocks of ``own`` on the way through a loop that does most, and of those is shortest.

        Loops inside are passed through as if they took nothing.
        """
        place = {block: number for number, block in enumerate(self.order)}
        best: dict[int, tuple[float, int]] = {}
        came_from: dict[int, int] = {}
        for block in sorted(inside, key=place.__getitem__):
            done, length = 0.0, 0
            if block in own:
                done, length = work(self.instructions_of([block])), len(self.blocks[block])
            ahead = [each for each in self.predecessors[block] if each in best]
            if block != header:
                if not ahead:
                    continue
                came_from[block] = max(ahead, key=best.__getitem__)
                done += best[came_from[block]][0]
                length -= best[came_from[block]][1]
            best[block] = (done, -length)
        step = max((each for each in best if header in self.successors[each]), key=best.__getitem__)
        path = [step]
        while step != header:
            step = came_from[step]
            path.append(step)
        return [block for block in reversed(path) if block in own]


def find_loops(code: Code, work: Work) -> dict[int, Loop]:
    """Every loop of a kernel by the block that it begins with."""
    flow = Flow(code)
    blocks = flow.loops()
    found = {}
    for header, whole in blocks.items():
        inside = frozenset(start for start in blocks if start in whole and start != header)
        own = whole.difference(*(blocks[start] for start in inside))
        outside = [start for start, other in blocks.items() if header in other and start != header]
        around: Blocks = frozenset()
        if outside:
            nearest = blocks[min(outside, key=lambda start: len(blocks[start]))]
            around = nearest.difference(*(other for other in blocks.values() if other < nearest))
        found[header] = Loop(
            flow.instructions_of(own),
            flow.instructions_of(flow.way_round(header, whole, own, work)),
            flow.instructions_of(around),
            inside,
        )
    return found


def uses_tensor_cores(instructions: Iterable[Instruction]) -> bool:
    """Whether there is an instruction of matrices among these."""
    return any(each.base.endswith("MMA") for each in instructions)


def main_loop(code: Code, work: Work) -> Loop | None:
    """The innermost loop with most arithmetic on the way round it.

    Of two that do as much it is the one with the shorter way: the other has checks of edges. Where
    no loop computes, it is the one that moves most of global memory.
    """
    loops = find_loops(code, work)
    done = {header: work(loop.way) for header, loop in loops.items()}

    def counts(inner: int, outer: int) -> bool:
        """Whether a loop does enough that the one around it is not the main one.

        A 64th: what is around is gone round less often. Tensor cores make it more.
        """
        tensor = uses_tensor_cores(loops[inner].way) or not uses_tensor_cores(loops[outer].way)
        return tensor and 0 < done[outer] <= 64 * done[inner]

    innermost = [
        outer for outer in loops if not any(counts(inner, outer) for inner in loops[outer].inside)
    ]

    def importance(header: int) -> tuple[float, int, int]:
        way = loops[header].way
        moved = sum(each.bits for each in way if each.base in ("LDG", "STG", "LDGSTS"))
        return done[header], moved, -len(way)

    return loops[max(innermost, key=importance)] if innermost else None
