"""The question before an act that cannot be taken back."""

from __future__ import annotations

import sys
from typing import TextIO

from chaoskit.errors import BadInput


def confirm(
    text: str,
    assume_yes: bool,
    stream: TextIO | None = None,
    output: TextIO | None = None,
) -> bool:
    """Ask a question once, and return True if the answer is yes.

    Args:
        text: the question, without a question mark.
        assume_yes: True if the user has answered before, by the option ``--yes``.
        stream: the terminal that is read; standard input by default.
        output: the stream on which the question is written; standard error by default.

    Raises:
        BadInput: if ``stream`` is not a terminal, so that there is no answer.
    """
    if assume_yes:
        return True
    stream, output = stream or sys.stdin, output or sys.stderr
    require_terminal(assume_yes, text, stream)
    output.write(f"{text}? [y/N] ")
    output.flush()
    return stream.readline().strip().lower() in ("y", "yes")


def require_terminal(assume_yes: bool, text: str, stream: TextIO | None = None) -> None:
    """Refuse to begin where the question could not be answered later.

    Args:
        assume_yes, text, stream: as for :func:`confirm`.

    Raises:
        BadInput: if the user has not answered before, and ``stream`` is not a terminal.
    """
    if not (assume_yes or (stream or sys.stdin).isatty()):
        raise BadInput("yes", "false", f"give --yes: there is no terminal on which to ask: {text}?")
