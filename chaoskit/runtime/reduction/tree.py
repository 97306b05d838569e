"""The canonical summation tree over the shards of the global batch.

Pure: without tensors and ranks.

A node is an aligned power-of-two range of shards, clipped to their number. Its sum is the sum of
its left half plus the sum of its right half. A half that is clipped away passes the other one
through. Floating-point addition is not associative, so only this order makes a sum the same at
every world size.

-> coordinator/membership/assignment.py gives whole subtrees to ranks. reduction/gradients.py adds
on one rank, reduction/exact.py over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple


class Subtree(NamedTuple):
    """The node that holds the shards ``lo`` to ``hi - 1``."""

    lo: int
    hi: int

    @property
    def shards(self) -> range:
        return range(self.lo, self.hi)


class Merge(NamedTuple):
    """An addition: ``parent = left + right``."""

    left: Subtree
    right: Subtree
    parent: Subtree


def halves(node: Subtree) -> tuple[Subtree, Subtree]:
    """Return the left and the right child of a node with more than one shard."""
    middle = node.lo + (1 << (node.hi - node.lo - 1).bit_length()) // 2
    return Subtree(node.lo, middle), Subtree(middle, node.hi)


def merge_above(node: Subtree, count: int) -> Merge | None:
    """Return the addition in which ``node`` is an operand, in the tree over ``count`` shards.

    Return None for the root.
    """
    span = 1 << (node.hi - node.lo - 1).bit_length()
    while node != (0, count):
        span *= 2
        lo = node.lo // span * span
        parent = Subtree(lo, min(lo + span, count))
        if parent != node:
            return Merge(*halves(parent), parent)
    return None


def maximal_subtrees(shards: Iterable[int], count: int) -> tuple[Subtree, ...]:
    """Return the largest nodes whose shards are all among ``shards``, from left to right.

    Raises:
        ValueError: if a shard is not in ``range(count)``.
    """
    owned = set(shards)
    if not owned <= set(range(count)):
        raise ValueError(
            f"shards {sorted(owned - set(range(count)))} do not exist, there are {count}"
        )

    def descend(node: Subtree) -> Iterator[Subtree]:
        if owned.issuperset(node.shards):
            yield node
        elif node.hi - node.lo > 1:
            for half in halves(node):
                yield from descend(half)

    return tuple(descend(Subtree(0, count)))


def merge_order(subtrees: Iterable[Subtree], count: int) -> tuple[Merge, ...]:
    """Return the additions that turn the sums of ``subtrees`` into the root's.

    Operands come before their parents.

    Raises:
        ValueError: if the subtrees are not nodes of the tree that hold every shard once.
    """
    held_nodes = set(subtrees)
    merges: list[Merge] = []
    held_count = 0

    def descend(node: Subtree) -> None:
        nonlocal held_count
        if node in held_nodes:
            held_count += 1
            return
        if node.hi - node.lo == 1:
            raise ValueError(f"no subtree holds shard {node.lo}")
        left, right = halves(node)
        descend(left)
        descend(right)
        merges.append(Merge(left, right, node))

    descend(Subtree(0, count))
    if held_count != len(held_nodes):
        raise ValueError(
            f"{sorted(held_nodes)} overlap, or are not nodes of the tree over {count} shards"
        )
    return tuple(merges)


def folds(held: Collection[Subtree], shard: int, count: int) -> tuple[Merge, ...]:
    """Return the additions that ``shard`` makes possible when it joins the subtrees ``held``.

    They are ordered from the leaf to the root.

    If they are done at once, like carries of a binary counter, at most ``log2(count) + 1`` sums
    are alive when shards arrive in order. In any order of arrival, exactly the
    :func:`maximal_subtrees` remain.

    Raises:
        ValueError: if the shard is held already, or does not exist.
    """
    if not 0 <= shard < count:
        raise ValueError(f"shard {shard} does not exist, there are {count}")
    if any(shard in node.shards for node in held):
        raise ValueError(f"shard {shard} is already in the sum")
    merges = []
    node = Subtree(shard, shard + 1)
    while merge := merge_above(node, count):
        sibling = merge.right if merge.left == node else merge.left
        if sibling not in held:
            break
        merges.append(merge)
        node = merge.parent
    return tuple(merges)
