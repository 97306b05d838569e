"""Writes of a job's script into registered state between two transactions.

A step commits behind the loop over its shards. Code that follows may still change what is registered: an average of the
weights that is updated after each step, a learning rate that is set by hand. From the first such write on, the state of
a step counts once the next transaction is entered: peers, copies and the final digest take that state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from chaoskit.checkpoint.layout.arena import ArenaView, decode_index
from chaoskit.errors import BadInput
from chaoskit.runtime.reduction.checksums import checksum, join
from chaoskit.runtime.state.registered import Registered

#: The word of a rank that took the state over: code behind the step ran once more there, and was undone.
ABSTAINS = -1

_WHOLE_CHECKS = 2  # transactions whose predecessors are compared bit by bit, in each process
_WHOLE_EVERY = 100  # transactions from one such comparison to the next
_STATE_WORDS = 2  # changes for which a rank shows the checksum of its whole state
_WORDS_PER_TENSOR = 4
_PAGE_WORDS = 8192  # one further word of each 64 KiB


class Change(IntEnum):
    """What the script did to the registered state since a commit."""

    NONE = 0
    POSSIBLE = 1  # one checksum differs and nothing else: damaged memory looks the same
    CERTAIN = 2


class _Marks(NamedTuple):
    """The registered state right after a commit. ``whole``: its checksum; 0 where that was not computed."""

    places: list[int]
    versions: list[int]
    scalars: bytes
    sample: NDArray[np.int64] | None
    whole: int


class ScriptWrites:
    """Compares the registered state at a commit with that at the next transaction.

    Writes in place show in the version counters of the tensors, and new tensors at their addresses. Writes through
    ``.data`` or NumPy leave no such trace. They show in a sample of the words in shared memory, and in checksums of the
    whole state in the first transactions of a process and in one of a hundred.

    Attributes:
        at_entry: whether the state of a step counts from the entry of the next transaction on. True until the first
            transaction has shown that the script writes nothing, and for ever after a write, which the state itself
            tells every process that takes it over (``Registered.script_writes``).
        word, state_word: what this rank shows of the changes behind the newest step. ``word``: 0 without one,
            :data:`ABSTAINS`, or a digest of the scalars whose lowest bit says that the change is certain.
            ``state_word``: checksum of the whole state; 0 where it is not shown.
    """

    def __init__(self) -> None:
        self._state: Registered
        self._sample: _ArenaSample | None = None
        self._marks: _Marks | None = None
        self._looks = 0
        self._changes = 0
        self._step = -1  # behind which the words tell of changes
        self.at_entry = True
        self.word = self.state_word = 0

    def watch(self, state: Registered, arena: ArenaView | None = None) -> None:
        """Compare these objects from now on.

        Args:
            arena: where their tensors lie; None for tensors that are not in shared memory.
        """
        self._state, self._marks = state, None
        self._sample = _ArenaSample(arena) if arena is not None else None

    def remember(self) -> None:
        """Take note of the state: the script goes on behind the step."""
        if self._state.step != self._step:
            self._step, self.word, self.state_word = self._state.step, 0, 0
        self._marks = self._read(fresh=True)

    def look(self) -> Change:
        """Return what has changed since :meth:`remember`. The script enters a transaction, or returns."""
        if self._marks is None:
            return Change.NONE
        change, self._marks = self.peek(), None
        self._looks += 1
        if change:
            self._state.script_writes = True
            self._changes += 1
            self._show(change)
        self.at_entry = self._state.script_writes
        return change

    def peek(self) -> Change:
        """Return what has changed since :meth:`remember`, in the middle of the script's code."""
        return (
            _compare(self._marks, self._read(fresh=False))
            if self._marks is not None
            else Change.NONE
        )

    def abstain(self) -> None:
        """Show nothing of this step: its state was taken over."""
        self.word, self.state_word = ABSTAINS, 0

    def _show(self, change: Change) -> None:
        if self.word == ABSTAINS:
            return
        digest = join(self._state.scalars_checksum()) & ~1
        self.word = digest | (change is Change.CERTAIN) or 2
        if self._changes <= _STATE_WORDS:
            self.state_word = checksum(self._state.memories())

    def _read(self, *, fresh: bool) -> _Marks:
        tensors, places = self._state.placed(fresh=fresh)
        whole = self._looks < _WHOLE_CHECKS or self._looks % _WHOLE_EVERY == 0
        return _Marks(
            places,
            _versions(tensors),
            self._state.noted_scalars(fresh=fresh),
            self._sample.read() if self._sample is not None else None,
            checksum(self._state.memories()) if whole else 0,
        )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of torch.inference_mode have none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _compare(before: _Marks, now: _Marks) -> Change:
    same_values = before.scalars == now.scalars and before.whole == now.whole
    if before.whole and same_values and before.places == now.places:
        return Change.NONE  # what was written has the same bits
    if (before.places, before.versions, before.scalars) != (now.places, now.versions, now.scalars):
        return Change.CERTAIN
    if before.sample is not None and now.sample is not None:
        changed = np.count_nonzero(before.sample != now.sample)
        if changed > 1:  # damage changes one word
            return Change.CERTAIN
        if changed:
            return Change.POSSIBLE
    return Change.POSSIBLE if before.whole != now.whole else Change.NONE


class Writes(NamedTuple):
    """What the ranks show of writes behind one step. Pure.

    Attributes:
        writers: ranks with a certain change.
        silent: ranks without any.
    """

    writers: list[int]
    silent: list[int]

    @classmethod
    def of(cls, words: Sequence[int], state_words: Sequence[int] = ()) -> Writes | None:
        """Return what the words of all ranks say; None where they agree, or where no change is certain.

        A difference without a certain change is left to the vote about corrupt ranks.
        """
        heard = {rank: word for rank, word in enumerate(words) if word != ABSTAINS}
        writers = [rank for rank, word in heard.items() if word & 1]
        differ = (
            len({word & ~1 for word in heard.values()}) > 1
            or len({word for word in state_words if word}) > 1
        )
        if not writers or not differ:
            return None
        return cls(writers, [rank for rank, word in heard.items() if not word])

    def refusal(self, step: int) -> BadInput:
        """Return the error for a script that does not write the same on all ranks.

        Args:
            step: committed steps.
        """
        what = f"changed on ranks {self.writers} and not on ranks {self.silent}"
        if not self.silent:
            what = f"changed to other values on each of the ranks {self.writers}"
        return BadInput(
            "trainer.register",
            f"{what} between steps {step - 1} and {step}",
            "let every rank write the same into what is registered: move that code into a function that is given to "
            "trainer.after_update, or leave its tensors out of what is registered",
        )

    def is_refused(self, states: Sequence[bytes]) -> bool:
        """Return whether the script is to blame, given a digest of each rank's state.

        Ranks whose states are equal have written the same bits, or none. Where all ranks have written, and most of
        them have the same state, the others may be damaged: the vote about corrupt ranks decides.
        """
        _, most = Counter(states).most_common(1)[0]
        if most == len(states):
            return False
        return bool(self.silent) or 2 * most <= len(states)


class _ArenaSample:
    """Some words of every tensor in an arena, at places that stay the same while its layout does."""

    def __init__(self, arena: ArenaView) -> None:
        self._arena = arena
        self._index = b""
        self._places = np.zeros(0, dtype=np.int64)

    def read(self) -> NDArray[np.int64]:
        """Return the words at these places."""
        index = self._arena.index_bytes()
        if index != self._index:
            self._index, self._places = index, _places(index, self._arena.size_bytes)
        data = self._arena.data()
        words = np.frombuffer(data, dtype=np.int64, count=len(data) // 8)
        return words[self._places]


def _places(index: bytes, size_bytes: int) -> NDArray[np.int64]:
    places = [np.zeros(0, dtype=np.int64)]
    for slot in decode_index(index, size_bytes):
        first, count = slot.offset // 8, slot.size_bytes // 8
        sampled = min(count, _WORDS_PER_TENSOR + count // _PAGE_WORDS)
        if sampled:
            places.append(first + np.arange(sampled, dtype=np.int64) * count // sampled)
    return np.concatenate(places)
