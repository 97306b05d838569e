"""The question before an act: asked once on a terminal, refused without one."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from typing import TextIO

import pytest

from chaoskit.cli.confirm import confirm
from chaoskit.errors import BadInput


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Yield the descriptor of a user that types, and the terminal that a command reads."""
    user, command = pty.openpty()
    with open(command) as stream:  # noqa: PTH123  # a descriptor
        yield user, stream
    os.close(user)


@pytest.mark.parametrize(
    ("typed", "is_yes"),
    [
        ("y\n", True),
        ("YES\n", True),
        ("n\n", False),
        ("\n", False),
        ("yesterday\n", False),
        ("\x04", False),
    ],
)
def test_a_terminal_is_asked_once(terminal: tuple[int, TextIO], typed: str, is_yes: bool) -> None:
    user, stream = terminal
    output = io.StringIO()
    os.write(user, typed.encode())
    assert confirm("strike 2 of 8 nodes", False, stream, output) is is_yes
    assert output.getvalue() == "strike 2 of 8 nodes? [y/N] "


def test_yes_is_given_before() -> None:
    output = io.StringIO()
    assert confirm("strike", True, io.StringIO(""), output)
    assert output.getvalue() == ""


def test_no_terminal() -> None:
    with pytest.raises(BadInput, match="give --yes: there is no terminal") as caught:
        confirm("strike", False, io.StringIO("y\n"), io.StringIO())
    assert caught.value.field == "yes"
