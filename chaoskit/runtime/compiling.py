"""Compilations by ``torch.compile`` in the middle of a step: they take seconds, and must not be called a hang."""

from __future__ import annotations

from typing import Any

from chaoskit.runtime.board import Board
from chaoskit.vocabulary import Phase


def declare_compilations(board: Board) -> None:
    """Show every compilation of this process as a long phase, and afterwards the phase that it interrupted."""
    from torch._dynamo.callback import callback_handler

    interrupted: list[Phase] = []

    def begin(*_: Any) -> None:
        interrupted.append(board.phase)
        board.enter(Phase.LONG)

    def end(*_: Any) -> None:
        if interrupted:
            board.enter(interrupted.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
