"""Text for people: what comes from outside made safe to show on a terminal, and nouns with their numbers."""

from __future__ import annotations

import re
import sys

#: C0 but newline and tab, DEL, and C1: what moves cursors, changes titles and clears screens.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}

_ROW_LENGTH_MAX = 60
_VARIABLES = re.compile(r"^env( [A-Za-z_]\w*=\S*)+ ")
#: The folders before the last part of an argument that is an absolute path.
_FOLDERS = re.compile(r"(?<!\S)/(\S*/)?(?=[^\s/])")
#: A port behind an IP address: a client has another one for each connection.
_PORT = re.compile(r"(\d+\.\d+\.\d+\.\d+|\]):\d+")


def printable(text: str) -> str:
    r"""The text with control characters written as escapes, such as ``\x1b``; newlines and tabs stay."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """The same as :func:`printable`, in one line: each run of white space is one blank."""
    return printable(" ".join(text.split()))


def plural(count: int, word: str, several: str = "") -> str:
    """``1 node``, ``2 nodes``; ``several`` is the plural that ``s`` does not make: ``2 recoveries``."""
    return f"{count} {word}" if count == 1 else f"{count} {several or word + 's'}"


def shorten(text: str, length_max: int = _ROW_LENGTH_MAX) -> str:
    """The beginning and the end of a long text, such as a command, in one line of a table."""
    line = one_line(text)
    if len(line) <= length_max:
        return line
    end = length_max // 3
    return f"{line[: length_max - end - 3].rstrip()} … {line[len(line) - end :].lstrip()}"


def shorten_command(command: str, length_max: int = _ROW_LENGTH_MAX) -> str:
    """Return a command in one line of limited length, with the name of its script if that fits.

    A long command first loses the variables that ``env`` sets and the folders of its files, then the last options of
    its launcher.
    """
    line = one_line(command)
    if len(line) <= length_max:
        return line
    line = _FOLDERS.sub("", _VARIABLES.sub("", line))
    words = line.split(" ")
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), 0)
    without = (" ".join([*words[:kept], "…", *words[script:]]) for kept in range(script - 1, 0, -1))
    return next(
        (text for text in (line, *without) if len(text) <= length_max), shorten(line, length_max)
    )


def same_but_ports(text: str, other: str) -> bool:
    """Return whether two texts differ in nothing but the numbers of ports."""
    return _PORT.sub(r"\1", text) == _PORT.sub(r"\1", other)


def echo(text: str) -> None:
    """Write a line of text that comes from outside to standard output."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def tell_on_stderr(line: str) -> None:
    """Show people a line, beside what a command prints."""
    print(f"chaoskit: {one_line(line)}", file=sys.stderr)
