"""Compilations by ``torch.compile`` within a step.

They take seconds, and must not count as a hang.

-> coordinator/detectors/hang.py: the limit of each phase.
"""

from __future__ import annotations

from typing import Any

from chaoskit.process.progress_board import Board
from chaoskit.vocabulary import Phase


class Compilations:
    """Shows every compilation of this process as a long phase, and the interrupted phase after it.

    Make only one per process: a second one would take the long phase of the first for the
    interrupted phase.
    """

    def __init__(self, board: Board) -> None:
        from torch._dynamo.callback import callback_handler

        self._board, self._handler = board, callback_handler
        self._interrupted: list[Phase] = []
        self.watch()

    def watch(self) -> None:
        """Register for compilations again, because ``torch.compiler.reset()`` drops all callbacks.

        The call costs next to nothing.
        """
        if self._begin not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._begin)
        if self._end not in self._handler.end_callbacks:
            self._handler.register_end_callback(self._end)

    def _begin(self, *_: Any) -> None:
        self._interrupted.append(self._board.phase)
        self._board.enter(Phase.LONG)

    def _end(self, *_: Any) -> None:
        if self._interrupted:
            self._board.enter(self._interrupted.pop())
