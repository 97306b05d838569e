"""Writes of a job's script into registered state between two transactions.

A step commits after the loop over its shards. The code after it may still change registered state:
an average of the weights that is updated after each step, a learning rate that is set by hand. From
the first such write on, the state of a step is valid only once the next transaction is entered.
Peers, copies and the final digest take that state.

-> integrity/rank_checks.py shows the words of a rank to the others. step/inquiry.py ends the run if
the ranks wrote differently. state/parameter_watch.py: writes within a loop body.
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

#: The word of a rank that took the state over: code after the step ran again there, and was undone.
ABSTAINS = -1

_WHOLE_CHECKS = 2  # first transactions of a process in which the state is compared bit by bit
_WHOLE_EVERY = 100  # transactions between such comparisons
_STATE_WORDS = 2  # changes for which a rank shows the checksum of its whole state
_WORDS_PER_TENSOR = 4
_PAGE_WORDS = 8192  # one more word for each 64 KiB


class ScriptWrite(IntEnum):
    """The change of the registered state by the script since a commit."""

    NONE = 0
    POSSIBLE = 1  # one checksum differs and nothing else: damaged memory looks the same
    CERTAIN = 2


class _Marks(NamedTuple):
    """The registered state right after a commit.

    Attributes:
        addresses, versions: the address and the version counter of each tensor.
        scalars: all numbers, encoded.
        sample: words of the arena; None without one.
        whole_checksum: the checksum of the state; 0 where it was not computed.
    """

    addresses: list[int]
    versions: list[int]
    scalars: bytes
    sample: NDArray[np.int64] | None
    whole_checksum: int


class ScriptWrites:
    """Compares the registered state at a commit with that at the next transaction.

    Writes in place show in the version counters of the tensors, and new tensors at their addresses.
    Writes through ``.data`` or NumPy show in neither. They show in a sample of the words in shared
    memory. They also show in checksums of the whole state, in the first transactions of a process
    and in one of a hundred.

    Attributes:
        at_entry: True if the state of a step is valid only once the next transaction is entered. It
            is True until the first transaction has shown that the script writes nothing, and always
            after a write. The state itself passes this on to every process that takes it over
            (``Registered.script_writes``).
        word: this rank's digest of the changes after the newest step. 0 without a change,
            :data:`ABSTAINS`, or a digest of the scalars. The lowest bit of the digest is set if the
            change is certain.
        state_word: checksum of the whole state; 0 where it is not shown.
    """

    def __init__(self) -> None:
        self._state: Registered
        self._sample: _ArenaSample | None = None
        self._marks: _Marks | None = None
        self._look_count = 0
        self._change_count = 0
        self._step = -1  # the step after which the words describe changes
        self.at_entry = True
        self.word = self.state_word = 0

    def watch(self, state: Registered, arena: ArenaView | None = None) -> None:
        """Compare these objects from now on, and show no change of earlier ones.

        Objects that are registered anew are restored from a copy. The copy holds the writes that
        the words describe, and a new rank has noticed none of them.

        Args:
            arena: where their tensors lie; None for tensors that are not in shared memory.
        """
        self._state, self._marks = state, None
        self._step, self.word, self.state_word = -1, 0, 0
        self._sample = _ArenaSample(arena) if arena is not None else None

    def remember(self) -> None:
        """Record the state as the script goes on after the step.

        The words of an earlier step are dropped.
        """
        if self._state.step != self._step:
            self._step, self.word, self.state_word = self._state.step, 0, 0
        self._marks = self._read(fresh=True)

    def look(self) -> ScriptWrite:
        """Return the change since :meth:`remember` once the script enters a transaction or ends.

        :attr:`at_entry` and the words of this rank are set. A second call finds no change, and so
        does a call before the first :meth:`remember`.
        """
        if self._marks is None:
            return ScriptWrite.NONE
        change, self._marks = self.peek(), None
        self._look_count += 1
        if change:
            self._state.script_writes = True
            self._change_count += 1
            self._show(change)
        self.at_entry = self._state.script_writes
        return change

    def peek(self) -> ScriptWrite:
        """Return the change since :meth:`remember`, in the middle of the script's code.

        Nothing is set, so that :meth:`look` still finds the change.
        """
        return (
            _compare(self._marks, self._read(fresh=False))
            if self._marks is not None
            else ScriptWrite.NONE
        )

    def abstain(self) -> None:
        """Show nothing for this step, because its state was taken over."""
        self.word, self.state_word = ABSTAINS, 0

    def _show(self, change: ScriptWrite) -> None:
        """Set :attr:`word`, and for the first changes :attr:`state_word`, to show a change."""
        if self.word == ABSTAINS:
            return
        digest = join(self._state.scalars_checksum()) & ~1
        self.word = digest | (change is ScriptWrite.CERTAIN) or 2
        if self._change_count <= _STATE_WORDS:
            self.state_word = checksum(self._state.memories())

    def _read(self, *, fresh: bool) -> _Marks:
        """Return a record of the registered state as it is now.

        Args:
            fresh: the step was just committed.
        """
        tensors, addresses = self._state.placed(fresh=fresh)
        is_whole_due = self._look_count < _WHOLE_CHECKS or self._look_count % _WHOLE_EVERY == 0
        return _Marks(
            addresses,
            _versions(tensors),
            self._state.noted_scalars(fresh=fresh),
            self._sample.read() if self._sample is not None else None,
            checksum(self._state.memories()) if is_whole_due else 0,
        )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor; -1 for a tensor without one."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of torch.inference_mode have none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _compare(before: _Marks, now: _Marks) -> ScriptWrite:
    """Return the change between two records of the state: none, possible or certain."""
    same_values = before.scalars == now.scalars and before.whole_checksum == now.whole_checksum
    if before.whole_checksum and same_values and before.addresses == now.addresses:
        return ScriptWrite.NONE  # the written bits are the same
    if (before.addresses, before.versions, before.scalars) != (
        now.addresses,
        now.versions,
        now.scalars,
    ):
        return ScriptWrite.CERTAIN
    if before.sample is not None and now.sample is not None:
        changed = np.count_nonzero(before.sample != now.sample)
        if changed > 1:  # damage changes one word
            return ScriptWrite.CERTAIN
        if changed:
            return ScriptWrite.POSSIBLE
    return ScriptWrite.POSSIBLE if before.whole_checksum != now.whole_checksum else ScriptWrite.NONE


class Writes(NamedTuple):
    """The writes of all ranks after one step, if they differ. Pure.

    Attributes:
        writers: ranks with a certain change.
        silent: ranks without any.
    """

    writers: list[int]
    silent: list[int]

    @classmethod
    def of(cls, words: Sequence[int], state_words: Sequence[int] = ()) -> Writes | None:
        """Return the writes that the words of all ranks show.

        Return None if the words agree, or if no change is certain. A difference without a certain
        change is left to the vote about corrupt ranks.
        """
        shown = {rank: word for rank, word in enumerate(words) if word != ABSTAINS}
        writers = [rank for rank, word in shown.items() if word & 1]
        differ = (
            len({word & ~1 for word in shown.values()}) > 1
            or len({word for word in state_words if word}) > 1
        )
        if not writers or not differ:
            return None
        return cls(writers, [rank for rank, word in shown.items() if not word])

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
            "write the same values into the registered objects on every rank: move that code into "
            "a function for trainer.after_update, or do not register its tensors",
        )

    def is_refused(self, state_digests: Sequence[bytes]) -> bool:
        """Return whether the script is to blame, given a digest of each rank's state.

        Ranks with equal states have written the same bits, or none. If all ranks have written, and
        most of them have the same state, the others may be damaged: the vote about corrupt ranks
        decides.
        """
        _, largest_count = Counter(state_digests).most_common(1)[0]
        if largest_count == len(state_digests):
            return False
        return bool(self.silent) or 2 * largest_count <= len(state_digests)


class _ArenaSample:
    """Some words of every tensor in an arena, at places that only a new layout changes."""

    def __init__(self, arena: ArenaView) -> None:
        self._arena = arena
        self._layout = b""
        self._word_indices = np.zeros(0, dtype=np.int64)

    def read(self) -> NDArray[np.int64]:
        """Return the sampled words. They are chosen anew if the layout has changed."""
        layout = self._arena.index_bytes()
        if layout != self._layout:
            self._layout, self._word_indices = layout, _word_indices(layout, self._arena.size_bytes)
        data = self._arena.data()
        words = np.frombuffer(data, dtype=np.int64, count=len(data) // 8)
        return words[self._word_indices]


def _word_indices(layout: bytes, size_bytes: int) -> NDArray[np.int64]:
    """Return the positions of the words that are sampled, given the layout of an arena."""
    indices = [np.zeros(0, dtype=np.int64)]
    for slot in decode_index(layout, size_bytes):
        first, count = slot.offset // 8, slot.size_bytes // 8
        sampled = min(count, _WORDS_PER_TENSOR + count // _PAGE_WORDS)
        if sampled:
            indices.append(first + np.arange(sampled, dtype=np.int64) * count // sampled)
    return np.concatenate(indices)
