"""The part of a log that shows why a command failed: its error line, and some lines around it.

Launchers print a report after the error of a rank, and ranks print errors about a lost peer after
the error of that peer. So the result is the last error line of the first kind that the log has: an
error of the program, a lost connection, the report of a launcher.

-> ``experiment/run/log_ends.py``: which logs are searched, and when.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaoskit.stacks.patterns import strip_escapes

LINES = 10
_BYTES = 1 << 16  # the error is searched in so many bytes at the end of a log
_CHUNK_BYTES = 1 << 20
_CHARS_SHOWN = 300  # characters of a line that are shown
_LINES_AFTER = 2  # lines after the error, since messages may have several

# prefix of a rank: "[rank1]: " by torch, "[default1]:" by torchrun --tee
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s?|\d+: )+")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Expired)\b(?::|$)"
)
_ERROR = re.compile(
    r"\b(?:fatal|panic|exception|\w*error)\s*:(?!\s*(?:[-+.\d]|nan\b|inf\b))"
    r"|^(?:error|fatal)\b|\bfatal (?:python )?error\b"
    r"|command not found|no such file or directory|can't open file|permission denied|no space left on device"
    r"|no module named|out of memory|\boom[- ]kill|segmentation fault|bus error|core dumped|\baborted\b"
    r"|\bterminate called\b|^killed\b|line \d+:\s+\d+ killed\b",
    re.IGNORECASE,
)
_LOST_PEER = re.compile(
    r"connection (?:closed|reset|refused|aborted|timed out)|broken pipe|connectFullMesh failed|socket timeout"
    r"|remote process exited|heartbeat timeout|timed out (?:after|waiting)|watchdog|\bNCCL\b.*remote error",
    re.IGNORECASE,
)
_REPORT = re.compile(
    r"failed \(exitcode|CalledProcessError|^srun: error|^slurmstepd: error|^mpirun noticed|non-zero exit code"
)
# parts of such a report without the cause
_NO_CAUSE = re.compile(r"ChildFailedError|SignalException|error_file:|^\s*traceback :")

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_STALE_ADDRESSES = (
    "gloo tried addresses of ranks that had ended, as they stay in torchrun's store: "
    f"start torchrun with {_OWN_STORE} in its environment, unless it has that"
)
_FAILED_MESH = b"connectFullMesh failed"
_GLOO_PAIR = b"gloo/transport/tcp/pair.cc"  # source of gloo's message about a lost connection


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some lines of a log.

    Attributes:
        error: the line that looks most like the cause; "" if no line looks like an error.
        lines: the lines around it, or else the last ones.
    """

    error: str
    lines: tuple[str, ...]


def read_lines(path: Path) -> list[str]:
    """Return the last lines of a file, from at most 64 KiB; none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _BYTES))
            text = file.read(_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = text.split("\n")
    return lines[1:] if size > _BYTES else lines


def find_error(
    lines: Sequence[str], shows_step: Callable[[str], bool] = lambda line: False
) -> LogPart:
    """Return the line that shows why a command failed and lines around it, or else the last lines.

    Args:
        lines: the lines of a log.
        shows_step: returns whether a line shows a step or a loss, and so no error.
    """
    shown = [line for line in map(_final_text, lines) if _PREFIX.sub("", line).strip(" \t^~")]
    kinds = [
        0 if shows_step(line) else kind for line, kind in zip(shown, _kinds(shown), strict=True)
    ]
    kind = min(filter(None, kinds), default=0)
    if not kind:
        return LogPart("", tuple(line[:_CHARS_SHOWN] for line in shown[-LINES:]))
    place = len(kinds) - 1 - kinds[::-1].index(kind)
    end = len(shown) if place >= len(shown) - LINES else place + 1 + _LINES_AFTER
    part = shown[max(0, end - LINES) : end]
    return LogPart(shown[place].strip()[:_CHARS_SHOWN], tuple(line[:_CHARS_SHOWN] for line in part))


def find_hints(path: Path, command: Sequence[str], *, stood_still: bool = False) -> list[str]:
    """Return advice against failures in a log, a sentence each; none if nothing known is in it.

    Nothing is advised if the command already has the setting.

    Args:
        path: the log.
        command: the arguments of the command.
        stood_still: True if the command did not end by itself.
    """
    if any(_OWN_STORE in word for word in command):
        return []
    if _has(path, _FAILED_MESH):
        return [f"the log has {_FAILED_MESH.decode()!r}: {_STALE_ADDRESSES}"]
    restarts = any(word.startswith("--max-restarts") for word in command)
    if stood_still and restarts and _has(path, _GLOO_PAIR):
        return [f"ranks may have waited for each other after a restart, if {_STALE_ADDRESSES}"]
    return []


def _has(path: Path, text: bytes) -> bool:
    """Return whether a file contains a text; False if it cannot be read.

    It is read in chunks, since a log may be too long for memory.
    """
    end = b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                if text in end + chunk:
                    return True
                end = chunk[-len(text) :]
    except OSError:
        return False
    return False


def _final_text(line: str) -> str:
    """Return a line as a terminal shows it, without escape sequences and overwritten text."""
    return strip_escapes(line.rstrip("\r").rpartition("\r")[2]).rstrip()


def _kinds(lines: Sequence[str]) -> list[int]:
    """Return the kind of each line.

    The kinds are 1 for an error of the program, 2 for a lost peer, 3 for the report of a launcher,
    and 0 for no error.
    """
    kinds: list[int] = []
    open_tracebacks: set[str] = set()  # prefixes of the ranks that print a traceback now
    for line in lines:
        prefix = match.group() if (match := _PREFIX.match(line)) else ""
        text = line[len(prefix) :]
        # the line after a traceback is an exception of any name
        is_exception = prefix in open_tracebacks and not text[:1].isspace()
        if text.startswith(_TRACEBACK):
            open_tracebacks.add(prefix)
        elif is_exception:
            open_tracebacks.discard(prefix)
        kinds.append(_kind(text, is_exception=is_exception and not text.startswith(_TRACEBACK)))
    return kinds


def _kind(text: str, *, is_exception: bool) -> int:
    """Return the kind of a line without its prefix, as in :func:`_kinds`."""
    if _NO_CAUSE.search(text):
        return 0
    if _REPORT.search(text):
        return 3
    if not is_exception and not _EXCEPTION.match(text) and not _ERROR.search(text):
        return 0
    return 2 if _LOST_PEER.search(text) else 1
