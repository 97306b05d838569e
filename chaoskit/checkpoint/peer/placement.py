"""Where the copies of each node's pieces lie: pure decisions.

Nodes form disjoint cells, as small as the number of copies allows: with one copy they are pairs, and one triple where
the count is odd. Whoever loses a set of nodes loses a piece only if a whole cell, or its last copies, were among them;
in a ring every two neighbours would be such a set. Cells reach over racks, and over parallel groups where they can. A
cell that is still good is kept, so little is copied when membership changes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from chaoskit.errors import BadInput

#: Partners of each piece, by its name.
Placement = dict[str, tuple[str, ...]]
_ENUMERATED_MAX = 1_000_000


class Node(NamedTuple):
    """A failure domain. ``rack``: what it shares with others that may fail together; "" if nothing is known."""

    name: str
    rack: str = ""


class Piece(NamedTuple):
    """A part of the state, and the node whose rank holds it.

    Args:
        groups: names of the parallel groups of that rank, such as its FSDP shard group and its replica group.
    """

    name: str
    node: str
    groups: tuple[str, ...] = ()


def place(
    nodes: Sequence[Node],
    pieces: Sequence[Piece],
    copies: int = 1,
    before: Mapping[str, Sequence[str]] | None = None,
) -> Placement:
    """Choose the partners of every piece: always other nodes; the first of them in another rack, if there is one.

    Equal input gives equal output, whatever its order.

    Args:
        copies: wanted of each piece, besides its owner's. There are fewer where nodes are fewer.
        before: what was chosen last; of nodes that are gone, too.

    Raises:
        BadInput: if ``copies`` is below 1, or a piece lies on an unknown node.
    """
    if copies < 1:
        raise BadInput("copies", copies, "use 1 or more")
    known = {node.name for node in nodes}
    for piece in pieces:
        if piece.node not in known:
            raise BadInput("pieces", piece.node, "give every piece a node that is there")
    plan = _Plan(nodes, pieces, copies, before or {})
    partners = plan.partners()
    return {piece.name: partners[piece.node] for piece in sorted(pieces)}


def exposure(
    pieces: Iterable[Piece], copies: int, verified: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """How many copies each piece lacks; pieces that lack none are left out.

    Args:
        verified: by piece, the living nodes that have a verified copy of the protected step.
    """
    lacking = {
        piece.name: copies - len({*verified.get(piece.name, ())} - {piece.node}) for piece in pieces
    }
    return {name: count for name, count in lacking.items() if count > 0}


# -- cells ----------------------------------------------------------------------------------------------------------


class _Plan:
    """One run of :func:`place`, on the level of nodes."""

    def __init__(
        self,
        nodes: Sequence[Node],
        pieces: Sequence[Piece],
        copies: int,
        before: Mapping[str, Sequence[str]],
    ) -> None:
        self._rack = {node.name: node.rack for node in sorted(nodes)}
        self._racks = len(set(self._rack.values()))
        self._copies = min(copies, len(self._rack) - 1)
        self._before: dict[str, dict[str, None]] = {
            name: {} for name in self._rack
        }  # as ordered sets
        for piece in sorted(pieces):
            living = (name for name in before.get(piece.name, ()) if name in self._rack)
            self._before[piece.node].update(dict.fromkeys(living))
        self._groups = _avoidable_groups(self._rack, pieces)

    def partners(self) -> dict[str, tuple[str, ...]]:
        """Of every node."""
        if self._copies < 1:
            return dict.fromkeys(self._rack, ())
        if self._still_good():
            return {name: tuple(chosen) for name, chosen in self._before.items()}
        cells = self._kept()
        loose = sorted(set(self._rack) - {name for cell in cells for name in cell})
        cells = self._settle(cells, loose)
        self._improve(cells)
        return {name: chosen for cell in cells for name, chosen in self._choose(cell).items()}

    def _settle(self, kept: list[list[str]], loose: list[str]) -> list[list[str]]:
        """Cells for all: as few kept ones as possible are broken up for those who are loose."""
        cells, free = list(kept), list(loose)
        while cells and free and not self._can_stand_alone(free):
            free += cells.pop(self._most_useful(cells, free))
        if not free or not kept or self._can_stand_alone(free):
            return cells + self._cut(free)
        cells = list(kept)  # one rack holds most nodes, so some cells are larger than others
        for name in loose:
            best = min(
                cells, key=lambda cell: (not {*cell} & {*self._before[name]}, len(cell), cell)
            )
            cells[cells.index(best)] = sorted([*best, name])
        return cells

    def _still_good(self) -> bool:
        """Whether everybody has as many partners as wanted, and one beyond the rack, so that nothing need move."""
        return all(
            len(chosen) == self._copies and self._reaches_over([name, *chosen])
            for name, chosen in self._before.items()
        )

    def _kept(self) -> list[list[str]]:
        """Cells of before that are complete, of the smallest size, and reach over racks."""
        cells: list[list[str]] = []
        taken: set[str] = set()
        for name in self._rack:
            cell = {name, *self._before[name]}
            closed = all({other, *self._before[other]} == cell for other in cell)
            if (
                len(cell) == self._copies + 1
                and closed
                and not cell & taken
                and self._reaches_over(cell)
            ):
                cells.append(sorted(cell))
                taken |= cell
        return cells

    def _reaches_over(self, cell: Iterable[str]) -> bool:
        """Whether everybody has somebody in another rack, if there is one at all."""
        return self._racks == 1 or len({self._rack[name] for name in cell}) > 1

    def _can_stand_alone(self, loose: Sequence[str]) -> bool:
        """Whether good cells can be made of these nodes alone."""
        if len(loose) <= self._copies:
            return False
        largest = max(Counter(self._rack[name] for name in loose).values())
        return self._racks == 1 or largest <= -(-len(loose) // (self._copies + 1))

    def _most_useful(self, cells: Sequence[Sequence[str]], loose: Sequence[str]) -> int:
        """The cell that has the fewest nodes in the racks that are crowded already, or had to do with loose ones."""
        crowd = Counter(self._rack[name] for name in loose)
        partners = set[str]().union(*(self._before[name] for name in loose))

        def use(number: int) -> tuple[int, bool]:
            cell = cells[number]
            return sum(crowd[self._rack[name]] for name in cell), not partners & {*cell}

        return min(range(len(cells)), key=use)

    def _cut(self, loose: Sequence[str]) -> list[list[str]]:
        """New cells: neighbours in a row that is ordered by racks go to different ones."""
        if not loose:
            return []
        sizes = Counter(self._rack[name] for name in loose)
        count = len(loose) // (self._copies + 1)
        if len(sizes) > 1:  # at least one node of every cell must be outside of the largest rack
            count = min(count, len(loose) - max(sizes.values()))
        count = max(count, 1)
        row = sorted(
            loose, key=lambda name: (-sizes[self._rack[name]], self._rack[name], self._order(name))
        )
        return [sorted(row[number::count]) for number in range(count)]

    def _order(self, name: str) -> tuple[list[str], str]:
        return sorted(self._groups[name]), name

    def _improve(self, cells: list[list[str]]) -> None:
        """Exchange nodes between cells while that leaves fewer partners in a parallel group of their own."""
        for number in range(len(cells)):
            while self._shared(cells[number]) and self._exchange(cells, number):
                pass

    def _exchange(self, cells: list[list[str]], number: int) -> bool:
        for other in range(len(cells)):
            if other == number:
                continue
            for mine in cells[number]:
                for theirs in cells[other]:
                    one = sorted({*cells[number], theirs} - {mine})
                    two = sorted({*cells[other], mine} - {theirs})
                    if self._cost(one, two) < self._cost(cells[number], cells[other]):
                        cells[number], cells[other] = one, two
                        return True
        return False

    def _cost(self, *cells: Sequence[str]) -> tuple[int, int]:
        same_rack = sum(
            self._rack[a] == self._rack[b] for cell in cells for a, b in combinations(cell, 2)
        )
        return same_rack, sum(self._shared(cell) for cell in cells)

    def _shared(self, cell: Sequence[str]) -> int:
        return sum(len(self._groups[a] & self._groups[b]) for a, b in combinations(cell, 2))

    def _choose(self, cell: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Partners within a cell; in one of the smallest size, all others."""
        load: Counter[str] = Counter()
        chosen = {}
        for place_, name in enumerate(cell):
            ring = [*cell[place_ + 1 :], *cell[:place_]]
            chosen[name] = tuple(
                sorted(ring, key=lambda other: self._rank(name, other, load))[: self._copies]
            )
            load.update(chosen[name])
        return chosen

    def _rank(self, name: str, other: str, load: Mapping[str, int]) -> tuple[bool, int, bool, int]:
        near, shared = (
            self._rack[name] == self._rack[other],
            len(self._groups[name] & self._groups[other]),
        )
        return near, shared, other not in self._before[name], load[other]


def _avoidable_groups(rack: Mapping[str, str], pieces: Iterable[Piece]) -> dict[str, set[str]]:
    """By node, its parallel groups. A group on more than half of all nodes is left out: nobody can avoid it."""
    members: dict[str, set[str]] = {}
    for piece in pieces:
        for group in piece.groups:
            members.setdefault(group, set()).add(piece.node)
    found: dict[str, set[str]] = {name: set() for name in rack}
    for group, names in members.items():
        if 2 * len(names) <= len(rack):
            for name in names:
                found[name].add(group)
    return found


# -- what it is worth -----------------------------------------------------------------------------------------------


def survival_probability(
    nodes: Collection[str],
    lost: int,
    pieces: Iterable[Piece],
    placement: Mapping[str, Collection[str]],
    *,
    samples: int = 100_000,
    seed: int = 0,
) -> float:
    """Probability that every piece survives the loss of ``lost`` different nodes, each set of them equally likely.

    Exact if the cells are small, or the sets of nodes are few; else estimated from ``samples`` sets.
    """
    fatal = {frozenset({piece.node, *placement.get(piece.name, ())}) for piece in pieces}
    fatal = {group for group in fatal if not any(other < group for other in fatal)}
    cells = _connected(nodes, fatal)
    if sum(2 ** min(len(cell), 60) for cell in cells) <= _ENUMERATED_MAX:
        ways = [1]  # by number of lost nodes: sets of them that lose no piece
        for cell in cells:
            ways = _multiply(
                ways, _harmless(cell, [group for group in fatal if group <= cell]), lost
            )
        return (ways[lost] if lost < len(ways) else 0) / comb(len(nodes), lost)
    if comb(len(nodes), lost) <= _ENUMERATED_MAX:
        sets: Iterable[Sequence[str]] = combinations(sorted(nodes), lost)
    else:
        chance, names = random.Random(seed), sorted(nodes)
        sets = (chance.sample(names, lost) for _ in range(samples))
    survived = [_survives(set(gone), fatal) for gone in sets]
    return sum(survived) / len(survived)


def _survives(gone: set[str], fatal: Collection[frozenset[str]]) -> bool:
    return not any(group <= gone for group in fatal)


def _connected(nodes: Iterable[str], fatal: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Nodes whose losses have to do with each other."""
    cells = [frozenset({name}) for name in sorted(nodes)]
    for group in fatal:
        touched = [cell for cell in cells if cell & group]
        cells = [cell for cell in cells if not cell & group]
        cells.append(frozenset().union(*touched))
    return cells


def _harmless(cell: frozenset[str], fatal: Sequence[frozenset[str]]) -> list[int]:
    """By size: subsets of ``cell`` whose loss loses nothing."""
    return [
        sum(_survives(set(gone), fatal) for gone in combinations(sorted(cell), size))
        for size in range(len(cell) + 1)
    ]


def _multiply(one: Sequence[int], other: Sequence[int], degree: int) -> list[int]:
    """Product of two polynomials, up to ``degree``."""
    product = [0] * min(len(one) + len(other) - 1, degree + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: len(product) - i]):
            product[i + j] += a * b
    return product
