"""Puts back what the open entries of an undo file name, and writes down in it what is done."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaoskit.process.linux import boot_id, kernel_id
from chaoskit.substrate.undo.entries import (
    CgroupEntry,
    ProcessEntry,
    RepairOutcome,
    UndoEntry,
    from_json,
)

_LOOK_S = 0.02
_LINE_SHOWN = 60  # bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing that was put back, was found done already, or could not be put back.

    Attributes:
        act: the kind of entry; ``damaged`` of lines that say nothing.
        detail: why it failed, and what helps.
    """

    act: str
    target: str
    outcome: RepairOutcome
    detail: str = ""


@dataclass
class UndoFile:
    """An undo file as far as it can be read.

    Attributes:
        kernel: where its pids mean something; see :func:`chaoskit.process.linux.kernel_id`. "" where that is not told.
        entries: those that are open, by number.
        damaged: lines that say nothing, by number.
        begun: whether anything was written into it.
    """

    kernel: str = ""
    entries: dict[int, UndoEntry] = field(default_factory=dict)
    damaged: dict[int, bytes] = field(default_factory=dict)
    begun: bool = False

    @property
    def problem(self) -> str:
        """In words, the lines that cannot be read."""
        if not self.damaged:
            return ""
        number, line = next(iter(self.damaged.items()))
        more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
        shown = repr(line[:_LINE_SHOWN])[1:]
        remedy = "see what is left, then remove the file"
        return f"line {number}{more} cannot be read, and was not put back: {shown}; {remedy}"


def read(data: bytes) -> UndoFile:
    """Return what an undo file says. A torn last line counts as never written: its act was never begun."""
    found = UndoFile(begun=bool(data))
    *lines, torn = data.split(b"\n")
    if torn.lstrip(b"\0")[:1] not in (b"", b"{"):
        lines.append(torn)
    for number, line in enumerate(lines, 1):
        fields = _object(line)
        entry = from_json(fields) if fields is not None else None
        if fields is not None and set(fields) == {"kernel"} and isinstance(fields["kernel"], str):
            found.kernel = fields["kernel"]
        elif fields is not None and set(fields) == {"done"} and isinstance(fields["done"], int):
            found.entries.pop(fields["done"], None)
        elif fields is not None and entry is not None:
            found.entries[fields["entry"]] = entry
        else:
            found.damaged[number] = line
    return found


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def is_of_here(kernel: str) -> bool:
    """Whether pids of an undo file mean something to this process, or to no process any more: another boot's."""
    return kernel in ("", kernel_id()) or not kernel.startswith(f"{boot_id()}/")


def replay(
    found: UndoFile, mark: Callable[[int], None], patience_s: float, farewell_s: float = 0.0
) -> list[Repair]:
    """Put back what is open.

    Args:
        mark: is told the number of each entry of which nothing is left.
        patience_s: for how long what fails is tried again.
        farewell_s: for how long processes that end by themselves are let do so, with all that they have started.
    """
    gone = found.kernel not in (
        "",
        kernel_id(),
    )  # of a boot that is over: its processes and groups are, too
    open_entries = {
        number: entry
        for number, entry in sorted(found.entries.items(), key=lambda one: (one[1].order, one[0]))
        if not (gone and isinstance(entry, ProcessEntry | CgroupEntry))
    }
    repairs: dict[int, Repair] = {}
    for number, entry in found.entries.items():
        if number not in open_entries:
            repairs[number] = Repair(entry.act, entry.target, RepairOutcome.NOTHING_LEFT)
            mark(number)
    for entry in open_entries.values():
        with contextlib.suppress(OSError, ValueError):
            entry.let_go()
    begun_s = time.monotonic()
    while True:
        passed_s = time.monotonic() - begun_s
        is_last = passed_s >= patience_s
        for number, entry in list(open_entries.items()):
            if entry.ends_by_itself() and passed_s < farewell_s:
                break  # what comes after it is still in use
            repairs[number] = _undo(entry)
            may_come = passed_s < entry.may_come_s and not is_last and not gone
            if repairs[number].outcome == RepairOutcome.NOTHING_LEFT and may_come:
                continue
            if repairs[number].outcome != RepairOutcome.FAILED:
                del open_entries[number]
                mark(number)
        if not open_entries or (is_last and passed_s >= farewell_s):
            return [repairs[number] for number in sorted(repairs)]
        time.sleep(_LOOK_S)


def _undo(entry: UndoEntry) -> Repair:
    try:
        outcome, detail = entry.undo(), ""
    except Exception as error:  # noqa: BLE001 - one entry must not keep the others from being undone
        outcome, detail = RepairOutcome.FAILED, str(error) or type(error).__name__
    return Repair(entry.act, entry.target, outcome, detail)


def replay_file(
    descriptor: int, patience_s: float, farewell_s: float = 0.0
) -> tuple[list[Repair], UndoFile]:
    """Put back what the file behind a descriptor says, and append to it what is done."""
    data = _content(descriptor)
    found = read(data)
    if data.rpartition(b"\n")[2] and len(data.split(b"\n")) not in found.damaged:
        os.ftruncate(
            descriptor, data.rfind(b"\n") + 1
        )  # what is appended must be a line of its own

    def mark(number: int) -> None:
        with contextlib.suppress(OSError):  # no room: it is found done the next time
            os.write(descriptor, f'{{"done": {number}}}\n'.encode())

    return replay(found, mark, patience_s, farewell_s), found


def is_over(repairs: list[Repair], found: UndoFile) -> bool:
    """Whether nothing of an undo file is of use any more."""
    return not found.problem and all(repair.outcome != RepairOutcome.FAILED for repair in repairs)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def describe(repair: Repair) -> str:
    """Return one line for people."""
    if repair.act == "damaged":
        return f"{repair.target}: {repair.detail}"
    what = {"continue": "stopped", "kill": "running", "end": "running"}.get(repair.act, "behind")
    match repair.outcome:
        case RepairOutcome.NOTHING_LEFT:
            return f"{repair.act} {repair.target}: nothing left to do"
        case RepairOutcome.KEPT:
            return f"kept {repair.target}: its run was killed; judge it with: chaoskit judge {repair.target}/RUN"
        case RepairOutcome.FAILED:
            return f"{repair.act} {repair.target}: not put back{_because(repair.detail)}"
    return {
        "continue": f"continued {repair.target}, left {what}",
        "kill": f"ended {repair.target}, left {what}",
        "end": f"ended {repair.target}, left {what}",
        "command": f"ran {repair.target}",
        "container": f"removed container {repair.target}, left {what}",
    }.get(repair.act, f"removed {repair.target}, left {what}")


def _because(detail: str) -> str:
    return f": {detail}" if detail else ", and it is tried again at the next start"
