"""Placement of the copies of each node's pieces: pure decisions.

Nodes form disjoint cells, as small as the number of copies allows: with one copy they are pairs,
and one triple if the number of nodes is odd. If a set of nodes is lost, a piece is lost only if a
whole cell, or all holders of its copies, are among them; in a ring, every two neighbours would be
such a set. Cells reach over racks, and over parallel groups where they can. A cell that is still
good is kept, so little is copied when membership changes.

-> ``daemon/piece_keeper.py``: has the copies sent to the chosen nodes, by ``peer/sender.py``.
-> ``coordinator/membership/copy_search.py``: finds the copies after a loss.
-> ``runtime/state/pieces.py`` and ``runtime/state/peer.py``: a rank reads a copy back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from chaoskit.errors import BadInput

#: The partners of each piece, by its name.
Placement = dict[str, tuple[str, ...]]
_ENUMERATED_MAX = 1_000_000


class Node(NamedTuple):
    """A failure domain.

    ``rack`` is shared with other nodes that may fail together; "" if unknown.
    """

    name: str
    rack: str = ""


class Piece(NamedTuple):
    """A part of the state, and the node whose rank holds it.

    Args:
        name: name of the piece.
        node: name of the node.
        groups: names of the parallel groups of that rank, such as its FSDP shard group and its
            replica group.
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
    """Return the partners of every piece: names of nodes other than its own, by piece.

    The first partner is in another rack, if there is one. If all partners are kept from ``before``,
    it may be another partner. All pieces of a node get the same partners; a node that is alone gets
    none. Equal input gives equal output, whatever its order.

    Args:
        copies: number of copies of each piece, besides the owner's. There are fewer if there are
            too few nodes.
        before: the last placement, which may name nodes that are gone.

    Raises:
        BadInput: if ``copies`` is below 1, or a piece lies on an unknown node.
    """
    if copies < 1:
        raise BadInput("copies", copies, "use 1 or more")
    names = {node.name for node in nodes}
    for piece in pieces:
        if piece.node not in names:
            raise BadInput("pieces", piece.node, "give every piece a node of nodes=")
    plan = _Plan(nodes, pieces, copies, before or {})
    partners = plan.partners()
    return {piece.name: partners[piece.node] for piece in sorted(pieces)}


def exposure(
    pieces: Iterable[Piece], copies: int, verified: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """Return the number of missing copies of each piece; complete pieces are left out.

    Args:
        copies: number of copies that each piece should have, besides the owner's.
        verified: by piece, the living nodes that have a verified copy of the protected step.
    """
    missing_counts = {
        piece.name: copies - len({*verified.get(piece.name, ())} - {piece.node}) for piece in pieces
    }
    return {name: count for name, count in missing_counts.items() if count > 0}


# -- cells -----------------------------------------------------------------------------------------


class _Plan:
    """A run of :func:`place`, on the level of nodes."""

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
        # former partners of each node, as ordered sets
        self._before: dict[str, dict[str, None]] = {name: {} for name in self._rack}
        for piece in sorted(pieces):
            living = (name for name in before.get(piece.name, ()) if name in self._rack)
            self._before[piece.node].update(dict.fromkeys(living))
        self._groups = _avoidable_groups(self._rack, pieces)

    def partners(self) -> dict[str, tuple[str, ...]]:
        """Return the partners of every node."""
        if self._copies < 1:
            return dict.fromkeys(self._rack, ())
        if self._is_still_good():
            return {name: tuple(partners) for name, partners in self._before.items()}
        cells = self._good_cells()
        loose = sorted(set(self._rack) - {name for cell in cells for name in cell})
        cells = self._complete_cells(cells, loose)
        self._improve(cells)
        return {
            name: partners
            for cell in cells
            for name, partners in self._choose_partners(cell).items()
        }

    def _complete_cells(self, kept: list[list[str]], loose: list[str]) -> list[list[str]]:
        """Return cells for all nodes.

        As few kept cells as possible are broken up for the loose nodes.
        """
        cells, free = list(kept), list(loose)
        while cells and free and not self._can_form_cells(free):
            free += cells.pop(self._index_to_break_up(cells, free))
        if not free or not kept or self._can_form_cells(free):
            return cells + self._new_cells(free)
        cells = list(kept)  # one rack holds most nodes, so some cells are larger than others
        for name in loose:
            nearest_cell = min(
                cells, key=lambda cell: (not {*cell} & {*self._before[name]}, len(cell), cell)
            )
            cells[cells.index(nearest_cell)] = sorted([*nearest_cell, name])
        return cells

    def _is_still_good(self) -> bool:
        """Return True if each node has enough partners, one of them in another rack."""
        return all(
            len(partners) == self._copies and self._spans_racks([name, *partners])
            for name, partners in self._before.items()
        )

    def _good_cells(self) -> list[list[str]]:
        """Return the complete cells of the last placement that are small and span racks."""
        cells: list[list[str]] = []
        taken: set[str] = set()
        for name in self._rack:
            cell = {name, *self._before[name]}
            closed = all({other, *self._before[other]} == cell for other in cell)
            if (
                len(cell) == self._copies + 1
                and closed
                and not cell & taken
                and self._spans_racks(cell)
            ):
                cells.append(sorted(cell))
                taken |= cell
        return cells

    def _spans_racks(self, cell: Iterable[str]) -> bool:
        """Return True if the cell has nodes in several racks, or all nodes are in one rack."""
        return self._racks == 1 or len({self._rack[name] for name in cell}) > 1

    def _can_form_cells(self, loose: Sequence[str]) -> bool:
        """Return True if good cells can be made of these nodes alone."""
        if len(loose) <= self._copies:
            return False
        largest = max(Counter(self._rack[name] for name in loose).values())
        return self._racks == 1 or largest <= -(-len(loose) // (self._copies + 1))

    def _index_to_break_up(self, cells: Sequence[Sequence[str]], loose: Sequence[str]) -> int:
        """Return the index of the cell to break up for the loose nodes.

        It has the fewest nodes in the racks that are crowded already; then former partners of loose
        nodes come first.
        """
        crowd = Counter(self._rack[name] for name in loose)
        partners = set[str]().union(*(self._before[name] for name in loose))

        def breaking_cost(index: int) -> tuple[int, bool]:
            cell = cells[index]
            return sum(crowd[self._rack[name]] for name in cell), not partners & {*cell}

        return min(range(len(cells)), key=breaking_cost)

    def _new_cells(self, loose: Sequence[str]) -> list[list[str]]:
        """Return new cells. Neighbours in a row that is ordered by racks go to different cells."""
        if not loose:
            return []
        sizes = Counter(self._rack[name] for name in loose)
        cell_count = len(loose) // (self._copies + 1)
        if len(sizes) > 1:  # at least one node of every cell must be outside of the largest rack
            cell_count = min(cell_count, len(loose) - max(sizes.values()))
        cell_count = max(cell_count, 1)
        row = sorted(
            loose,
            key=lambda name: (-sizes[self._rack[name]], self._rack[name], self._group_order(name)),
        )
        return [sorted(row[first::cell_count]) for first in range(cell_count)]

    def _group_order(self, name: str) -> tuple[list[str], str]:
        """Return a sort key that puts nodes with the same parallel groups next to each other."""
        return sorted(self._groups[name]), name

    def _improve(self, cells: list[list[str]]) -> None:
        """Exchange nodes between cells while fewer partners then share a parallel group."""
        for index in range(len(cells)):
            while self._shared_group_count(cells[index]) and self._exchange(cells, index):
                pass

    def _exchange(self, cells: list[list[str]], index: int) -> bool:
        """Make the first exchange of two nodes that lowers the cost, in place.

        Return True if one was made, and False if there is none.
        """
        for other_index in range(len(cells)):
            if other_index == index:
                continue
            for own_name in cells[index]:
                for other_name in cells[other_index]:
                    new_cell = sorted({*cells[index], other_name} - {own_name})
                    new_other = sorted({*cells[other_index], own_name} - {other_name})
                    if self._cost(new_cell, new_other) < self._cost(
                        cells[index], cells[other_index]
                    ):
                        cells[index], cells[other_index] = new_cell, new_other
                        return True
        return False

    def _cost(self, *cells: Sequence[str]) -> tuple[int, int]:
        """Return the number of pairs in the same rack, and of groups that pairs share."""
        same_rack = sum(
            self._rack[a] == self._rack[b] for cell in cells for a, b in combinations(cell, 2)
        )
        return same_rack, sum(self._shared_group_count(cell) for cell in cells)

    def _shared_group_count(self, cell: Sequence[str]) -> int:
        """Return the number of parallel groups that nodes of the cell share, counted by pairs."""
        return sum(len(self._groups[a] & self._groups[b]) for a, b in combinations(cell, 2))

    def _choose_partners(self, cell: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the partners of each node of a cell; in the smallest cells, all others."""
        load: Counter[str] = Counter()
        partners = {}
        for position, name in enumerate(cell):
            ring = [*cell[position + 1 :], *cell[:position]]
            partners[name] = tuple(
                sorted(ring, key=lambda candidate: self._partner_key(name, candidate, load))[
                    : self._copies
                ]
            )
            load.update(partners[name])
        return partners

    def _partner_key(
        self, name: str, other: str, load: Mapping[str, int]
    ) -> tuple[bool, int, bool, int]:
        """Return the sort key of ``other`` as a partner of ``name``: the smallest is the best."""
        is_in_same_rack, shared_groups = (
            self._rack[name] == self._rack[other],
            len(self._groups[name] & self._groups[other]),
        )
        return is_in_same_rack, shared_groups, other not in self._before[name], load[other]


def _avoidable_groups(rack: Mapping[str, str], pieces: Iterable[Piece]) -> dict[str, set[str]]:
    """Return the parallel groups of each node.

    Groups on more than half of all nodes are unavoidable, and are left out.
    """
    members: dict[str, set[str]] = {}
    for piece in pieces:
        for group in piece.groups:
            members.setdefault(group, set()).add(piece.node)
    groups: dict[str, set[str]] = {name: set() for name in rack}
    for group, names in members.items():
        if 2 * len(names) <= len(rack):
            for name in names:
                groups[name].add(group)
    return groups


# -- value of a placement --------------------------------------------------------------------------


def survival_probability(
    nodes: Collection[str],
    lost: int,
    pieces: Iterable[Piece],
    placement: Mapping[str, Collection[str]],
    *,
    samples: int = 100_000,
    seed: int = 0,
) -> float:
    """Return the probability (0 to 1) that every piece survives the loss of ``lost`` random nodes.

    The result is exact if the cells are small, or the possible sets of nodes are few. Otherwise it
    is estimated from ``samples`` sets.

    Args:
        nodes: names of all nodes.
        lost: number of nodes that are lost at once, at most all.
        placement: partners of each piece, by its name.
        samples: number of random sets of lost nodes for an estimate.
        seed: seed of these sets.
    """
    fatal_groups = {frozenset({piece.node, *placement.get(piece.name, ())}) for piece in pieces}
    fatal_groups = {
        group for group in fatal_groups if not any(other < group for other in fatal_groups)
    }
    cells = _independent_cells(nodes, fatal_groups)
    if sum(2 ** min(len(cell), 60) for cell in cells) <= _ENUMERATED_MAX:
        # number of sets of lost nodes that lose no piece, by the size of the set
        harmless_counts = [1]
        for cell in cells:
            harmless_counts = _multiply_polynomials(
                harmless_counts,
                _harmless_subset_counts(cell, [group for group in fatal_groups if group <= cell]),
                lost,
            )
        harmless_count = harmless_counts[lost] if lost < len(harmless_counts) else 0
        return harmless_count / comb(len(nodes), lost)
    if comb(len(nodes), lost) <= _ENUMERATED_MAX:
        sets: Iterable[Sequence[str]] = combinations(sorted(nodes), lost)
    else:
        generator, names = random.Random(seed), sorted(nodes)
        sets = (generator.sample(names, lost) for _ in range(samples))
    survived = [_survives(set(gone), fatal_groups) for gone in sets]
    return sum(survived) / len(survived)


def _survives(gone: set[str], fatal: Collection[frozenset[str]]) -> bool:
    """Return True if no group is lost completely."""
    return not any(group <= gone for group in fatal)


def _independent_cells(
    nodes: Iterable[str], fatal: Iterable[frozenset[str]]
) -> list[frozenset[str]]:
    """Return disjoint sets of all nodes. Losses in one set are independent of those in another."""
    cells = [frozenset({name}) for name in sorted(nodes)]
    for group in fatal:
        touched = [cell for cell in cells if cell & group]
        cells = [cell for cell in cells if not cell & group]
        cells.append(frozenset().union(*touched))
    return cells


def _harmless_subset_counts(cell: frozenset[str], fatal: Sequence[frozenset[str]]) -> list[int]:
    """Return, by size, the number of subsets of ``cell`` whose loss loses no piece."""
    return [
        sum(_survives(set(gone), fatal) for gone in combinations(sorted(cell), size))
        for size in range(len(cell) + 1)
    ]


def _multiply_polynomials(left: Sequence[int], right: Sequence[int], degree: int) -> list[int]:
    """Return the product of two polynomials, up to ``degree``."""
    product = [0] * min(len(left) + len(right) - 1, degree + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(product) - i]):
            product[i + j] += a * b
    return product
