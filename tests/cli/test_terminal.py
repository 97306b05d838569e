"""Text of jobs, and of files that others write, is shown on a terminal without control
sequences.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from support.waiting import LIMIT_S
from unit.report.test_report import outcome

from chaoskit.health import Quarantine
from chaoskit.plaintext import one_line, printable, same_but_ports
from chaoskit.pytest_plugin import VerdictError
from chaoskit.report.store import write_outcome
from chaoskit.report.terminal import Terminal
from chaoskit.runlog.outcome import TestResult
from chaoskit.vocabulary import Verdict

#: Clears the screen, sets the title, colours, goes back over what is written, and the same in C1; then markup.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b[31m\x08\r\x9b2J\x7f\x00 [red]mark[/red] [/] :boom: end"
SHOWN = r"\x1b[2J\x1b]0;owned"
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_control_characters_become_escapes() -> None:
    """All of C0 and C1 but newline and tab are escaped; every other character stays."""
    for code in range(0x3000):
        character = chr(code)
        control = code < 0x20 or 0x7F <= code < 0xA0
        assert printable(character) == (
            f"\\x{code:02x}" if control and character not in "\n\t" else character
        )
    assert one_line(" a\n\t b\x1b[m\r\n") == r"a b\x1b[m"


def _table(text: str) -> Table:
    table = Table("head", text, title=text)
    table.add_row(text, Text(text, "red"))
    return table


@pytest.mark.parametrize(
    "renderable",
    [HOSTILE, Text(HOSTILE), Text(HOSTILE, "bold red"), Padding(Text(HOSTILE), 1), _table(HOSTILE)],
    ids=["str", "text", "styled", "padded", "table"],
)
def test_nothing_that_is_printed_acts(renderable: RenderableType) -> None:
    """Text does nothing to the terminal when printed plainly, in a table, with a style, or in a
    live display.
    """
    file = io.StringIO()
    console = Terminal(file=file, width=200)
    console.print(renderable)
    console.print(renderable, soft_wrap=True)
    with Live(renderable, console=console, auto_refresh=False):
        pass
    written = file.getvalue()
    assert not _ACTS.search(written), ascii(written)
    assert written.count("[red]mark[/red] [/] :boom: end") >= 3
    assert SHOWN in written


def test_a_style_is_written_and_the_text_still_does_nothing() -> None:
    """The only sequences written to a terminal are those of rich."""
    file = io.StringIO()
    Terminal(file=file, width=200, force_terminal=True, color_system="standard").print(
        Text(HOSTILE, "red")
    )
    written = file.getvalue()
    assert written.startswith("\x1b[31m")
    assert not _ACTS.search(re.sub(r"\x1b\[\d*m", "", written)), ascii(written)


def run(directory: Path, *arguments: str, stderr: bool = False) -> str:
    environment = dict(os.environ, XDG_STATE_HOME=str(directory / "state"), COLUMNS="300")
    command = [sys.executable, "-m", "chaoskit", *arguments]
    ended = subprocess.run(
        command, env=environment, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert b"Traceback" not in ended.stderr
    return (ended.stderr if stderr else ended.stdout).decode()


def test_a_report_shows_what_jobs_and_tests_said(tmp_path: Path) -> None:
    """Reasons hold the last line of an exception, and names come from tests."""
    bad = outcome(HOSTILE, verdict=Verdict.FAILED)
    bad.reasons = [f"node0.0: ValueError: {HOSTILE}"]
    bad.test = TestResult(nodeid="test", failed=True, message=HOSTILE)
    write_outcome(bad, tmp_path)
    written = run(tmp_path, "report", str(tmp_path))
    assert not _ACTS.search(written), ascii(written)
    assert written.count("[red]mark[/red]") >= 3


def test_the_verdict_of_a_failed_test_is_shown_as_text() -> None:
    """pytest writes the error's message to the terminal unchanged."""
    bad = outcome("bad", verdict=Verdict.FAILED)
    bad.reasons = [HOSTILE]
    assert not _ACTS.search(str(VerdictError(bad)))


def test_a_list_of_nodes_and_an_error_show_what_was_written(tmp_path: Path) -> None:
    """Lists are files that other processes can write; errors repeat their input."""
    Quarantine(tmp_path / "state" / "chaoskit").add(
        "node3", HOSTILE.replace("\x00", ""), [HOSTILE.replace("\x00", "")]
    )
    listed = run(tmp_path, "node", "list")
    assert listed.count(SHOWN) == 2
    assert not _ACTS.search(listed), ascii(listed)
    refused = run(tmp_path, "report", "\x1b[2Jnone", stderr=True)
    assert refused
    assert not _ACTS.search(refused), ascii(refused)


def test_bad_input_of_another_process_is_shown_as_text(tmp_path: Path) -> None:
    """The field may be named by a launcher, or by any server that listens in its place."""
    from cli.test_control_api import answering

    from chaoskit.elastic.client import Door, open_door

    body = b'{"field": "\\u001b[2J", "value": 1, "remedy": "\\u001b[2J\\u009b2J"}'
    with answering(b"HTTP/1.0 400 Bad Request\r\n\r\n" + body) as url:
        open_door(tmp_path, Door(url, "token", os.getpid()))
        output = run(tmp_path, "scale", "2", "--run", str(tmp_path), stderr=True)
    assert r"\x1b[2J" in output
    assert not _ACTS.search(output), ascii(output)
    reply = b'{"accepted": false, "reason": "\\u001b[2J", "nodes": []}'
    with answering(b"HTTP/1.0 409 Conflict\r\n\r\n" + reply) as url:
        open_door(tmp_path, Door(url, "token", os.getpid()))
        output = run(tmp_path, "node", "drain", "node1", "--cancel", "--run", str(tmp_path))
    assert output == "refused: \\x1b[2J\n"


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        (
            "read tcp 10.0.0.1:43210->10.0.0.9:53: refused",
            "read tcp 10.0.0.1:43211->10.0.0.9:53: refused",
            True,
        ),
        ("dial [fd00::1]:43210: refused", "dial [fd00::1]:43299: refused", True),
        ("10.0.0.1:80", "10.0.0.2:80", False),
        ("image x:1 is absent", "image x:2 is absent", False),
        ("after 10 s", "after 11 s", False),
        ("", "10.0.0.1:80", False),
    ],
)
def test_lines_that_differ_in_ports_only_are_the_same(text: str, other: str, same: bool) -> None:
    assert same_but_ports(text, other) is same
