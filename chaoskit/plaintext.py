"""Text for terminals and reports: foreign text made safe to show, shortened lines, and plurals."""

from __future__ import annotations

import re
import sys

#: C0 without newline and tab, DEL, and C1: these characters move cursors, change titles and clear
#: screens.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}

_ROW_LENGTH_MAX = 60
_VARIABLES = re.compile(r"^env( [A-Za-z_]\w*=\S*)+ ")
#: The folders before the last part of an argument that is an absolute path.
_FOLDERS = re.compile(r"(?<!\S)/(\S*/)?(?=[^\s/])")
#: A port behind an IP address: a client has another port for each connection.
_PORT = re.compile(r"(\d+\.\d+\.\d+\.\d+|\]):\d+")


def printable(text: str) -> str:
    r"""Return the text with control characters as escapes, such as ``\x1b``, but newlines and tabs."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return the text as by :func:`printable`, in one line with single blanks."""
    return printable(" ".join(text.split()))


def plural(count: int, word: str, several: str = "") -> str:
    """Return a count with its noun: ``1 node``, ``2 nodes``. ``several`` is an irregular plural."""
    return f"{count} {word}" if count == 1 else f"{count} {several or word + 's'}"


def shorten(text: str, length_max: int = _ROW_LENGTH_MAX) -> str:
    """Return a text in one line of at most ``length_max`` characters.

    A longer text loses its middle.
    """
    line = one_line(text)
    if len(line) <= length_max:
        return line
    end = length_max // 3
    return f"{line[: length_max - end - 3].rstrip()} … {line[len(line) - end :].lstrip()}"


def shorten_command(command: str, length_max: int = _ROW_LENGTH_MAX) -> str:
    """Return a command in one line of limited length, with the name of its script if that fits.

    A long command first loses the variables that ``env`` sets and the folders of its files, then
    the last options of its launcher.
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
    """Return whether two texts are equal, apart from the numbers of ports behind IP addresses."""
    return _PORT.sub(r"\1", text) == _PORT.sub(r"\1", other)


def echo(text: str) -> None:
    """Write a line of foreign text to standard output, with control characters escaped."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def tell_on_stderr(line: str) -> None:
    """Write a message of chaoskit to standard error, in one line that begins with its name."""
    print(f"chaoskit: {one_line(line)}", file=sys.stderr)
