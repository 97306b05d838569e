"""Mistakes in the files of a command's run: journals, logs, and those of its unbroken run.

-> suites/canary/test_command.py makes each and judges the run again.
-> experiment/judge/command_coverage.py finds missing records and lines; command_audit.py wrong
ones.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit import Verdict
from chaoskit.suites.canary.journals import Journals, Plain

#: Step at which rank 1 is killed.
AT = 25
#: Steps of the run.
STEPS = 100
_RANKS = 2
_LATE_NS = 3_600_000_000_000


class RunFiles:
    """Files of one run, in a copy of its directory.

    Attributes:
        journals: journals by source.
        logs: lines of each node's log.
        twin: content of ``twin.json``; set it to None to delete the file.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.journals = Journals(run)
        self.logs = {
            path.name: path.read_text().splitlines(keepends=True)
            for path in (run / "log").glob("node*.log")
        }
        self.twin: dict[str, Any] | None = json.loads((run / "twin.json").read_text())

    def write(self) -> None:
        """Write all files anew; those that were dropped here are deleted."""
        self.journals.write()
        shutil.rmtree(self._run / "log")
        (self._run / "log").mkdir()
        for name, lines in self.logs.items():
            (self._run / "log" / name).write_text("".join(lines))
        (self._run / "twin.json").unlink()
        if self.twin is not None:
            (self._run / "twin.json").write_text(json.dumps(self.twin))

    @property
    def shown_steps(self) -> list[Plain]:
        """The records of the lines that the harness read in the logs, in order."""
        return [record for _, record in self.journals.of("logged")]

    def forget(self, dropped: list[Plain]) -> None:
        """Drop records of :attr:`shown_steps` from the harness's journal; the logs stay."""
        dropped_ids = {id(record) for record in dropped}
        self.journals.drop(lambda _, record: id(record) in dropped_ids)

    def erase(self, dropped: list[Plain]) -> None:
        """Drop the lines of records of :attr:`shown_steps` from the logs; the records stay.

        A record stands for the line with its number among those that show a step.
        """
        dropped_ids = {id(record) for record in dropped}
        kept = iter([id(record) not in dropped_ids for record in self.shown_steps])
        for name, lines in self.logs.items():
            self.logs[name] = [line for line in lines if not _step(line) or next(kept)]


Change = Callable[[RunFiles], None]


@dataclass(frozen=True)
class CommandDamage:
    """Mistake in the files of a run in which rank 1 is killed at step :data:`AT`.

    Both ranks come back in that run.

    Attributes:
        name: name in words.
        verdict: verdict of the run with it.
        change: function that makes it.
    """

    name: str
    verdict: Verdict
    change: Change


def _step(line: str) -> re.Match[str] | None:
    """Return a match if a line of the log shows a step, or None."""
    return re.search(r"step \d+ loss", line)


# -- selections of lines ---------------------------------------------------------------------------

Selection = Callable[[RunFiles], list[Plain]]


def one_line(files: RunFiles) -> list[Plain]:
    """Select a line in the middle."""
    return files.shown_steps[len(files.shown_steps) // 2 : len(files.shown_steps) // 2 + 1]


def of_the_last_steps(files: RunFiles) -> list[Plain]:
    """Select the last tenth of the steps."""
    return [record for record in files.shown_steps if record["step"] >= STEPS - STEPS // 10]


def of_many_steps(files: RunFiles) -> list[Plain]:
    """Select a fifth of the steps, all of them before the fault."""
    return [
        record for record in files.shown_steps if record["step"] < STEPS // 5 and record["step"] > 0
    ]


def shown_again(files: RunFiles) -> list[Plain]:
    """Select the lines that the second attempt repeats."""
    counts = Counter[int]()
    again = []
    for record in files.shown_steps:
        counts[record["step"]] += 1
        if counts[record["step"]] > _RANKS:
            again.append(record)
    return again


def after_the_fault(files: RunFiles) -> list[Plain]:
    """Select the lines from the fault on."""
    struck_ns = files.journals.first("injected")["t_ns"]
    return [record for record in files.shown_steps if record["t_ns"] > struck_ns]


def every_line(files: RunFiles) -> list[Plain]:
    """Select all lines."""
    return files.shown_steps


# -- changes of lines ------------------------------------------------------------------------------


def unread(select: Selection) -> Change:
    """Return a change that drops lines from the harness's journal, but not from the log."""
    return lambda files: files.forget(select(files))


def erased(select: Selection) -> Change:
    """Return a change that drops lines from the log, but not from the harness's journal."""
    return lambda files: files.erase(select(files))


def never_shown(select: Selection) -> Change:
    """Return a change that drops lines from the log and from the harness's journal."""

    def change(files: RunFiles) -> None:
        dropped = select(files)
        files.erase(dropped)
        files.forget(dropped)
        _recount(files)

    return change


def without_losses(left: int) -> Change:
    """Return a change after which only the first ``left`` lines have a loss, in log and journal."""

    def change(files: RunFiles) -> None:
        for record in files.shown_steps[left:]:
            record["loss"] = None
        for lines in files.logs.values():
            lines[left:] = [line.replace("loss", "cost") for line in lines[left:]]

    return change


def another_loss(files: RunFiles) -> None:
    """Change the loss of a line in log and journal alike."""
    (changed,) = one_line(files)
    number = [id(other) for other in files.shown_steps].index(id(changed))
    for lines in files.logs.values():
        lines[number] = re.sub(r"loss \S+", "loss 7.5", lines[number])
    changed["loss"] = "7.5"


def cut(files: RunFiles) -> None:
    """Drop the second half of each log."""
    files.logs = {name: lines[: len(lines) // 2] for name, lines in files.logs.items()}


def of_another_run(files: RunFiles) -> None:
    """Change the losses in the log, as if it were that of another run."""
    for name, lines in files.logs.items():
        files.logs[name] = [line.replace("loss 0.", "loss 0.1") for line in lines]


def _recount(files: RunFiles) -> None:
    """Set the number of lines in the harness's record to that of the changed logs."""
    lines = [line for lines in files.logs.values() for line in lines if line.strip()]
    files.journals.first("run_ended")["logs"]["lines"] = len(lines)


# -- journals --------------------------------------------------------------------------------------


def without(*events: str) -> Change:
    """Return a change that drops all records of these events."""
    return lambda files: files.journals.drop(lambda _, record: record["event"] in events)


def without_file(source: str) -> Change:
    """Return a change that drops all records of a process."""

    def change(files: RunFiles) -> None:
        del files.journals.files[source]

    return change


def without_starts_again(files: RunFiles) -> None:
    """Drop the node's records of all ranks after the first two."""
    later = [record for _, record in files.journals.of("rank_found")][_RANKS:]
    files.journals.drop(lambda _, record: any(record is other for other in later))


def misreported(event: str, **fields: object) -> Change:
    """Return a change that sets ``fields`` in the first record of an event."""
    return lambda files: files.journals.first(event).update(fields)


def struck_later(files: RunFiles) -> None:
    """Move the report of the act to a later step, and to the time of that step."""
    later = next(record for record in reversed(files.shown_steps) if record["step"] == STEPS // 2)
    struck = files.journals.first("injected")
    struck |= {"t_ns": later["t_ns"] + 1, "done_ns": later["t_ns"] + 2, "step": STEPS // 2}
    evidence = files.journals.first("evidence")
    evidence["t_ns"] = later["t_ns"] + 3


def struck_the_other_rank(files: RunFiles) -> None:
    """Name the process of rank 0 as the one that was struck."""
    other = next(record for _, record in files.journals.of("rank_found") if record["rank"] == 0)
    files.journals.first("injected").update(
        {"pid": other["pid"], "worker": f"node0.{other['pid']}"}
    )


def seen_before_it_acted(files: RunFiles) -> None:
    """Make the evidence older than the act."""
    files.journals.first("evidence")["t_ns"] = files.journals.first("injected")["t_ns"] - 1_000_000


def ended_otherwise(files: RunFiles) -> None:
    """Let the node report that its command ended with status 1, the harness with status 0."""
    files.journals.first("command_exited")["status"] = "status 1"


def another_command(files: RunFiles) -> None:
    """Let the node report another command."""
    files.journals.first("command_started")["command"] = ["true"]


def node_of_another_run(files: RunFiles) -> None:
    """Move the node's records to another time."""
    for record in files.journals.files["node0"]:
        record["t_ns"] -= _LATE_NS


# -- twins -----------------------------------------------------------------------------------------


def without_twin(files: RunFiles) -> None:
    """Drop the results of the unbroken run."""
    files.twin = None


def twin_of_another_run(files: RunFiles) -> None:
    """Let the results of the unbroken run belong to another run."""
    assert files.twin is not None
    files.twin["run_id"] = "0" * 32


def compared_with_itself(files: RunFiles) -> None:
    """Make run and unbroken run the same: no difference can be found."""
    assert files.twin is not None
    started = files.journals.first("started")
    files.twin["run_id"] = started["twin"] = started["run_id"]


_UNKNOWN, _ERROR, _FAILED = Verdict.UNKNOWN, Verdict.ERROR, Verdict.FAILED

COMMAND_DAMAGES: tuple[CommandDamage, ...] = (
    CommandDamage("the harness's journal is missing", _ERROR, without_file("harness")),
    CommandDamage("the harness wrote no end", _ERROR, without("run_ended")),
    CommandDamage("the harness does not tell that it began", _UNKNOWN, without("started")),
    CommandDamage(
        "the harness does not tell how a command ended",
        _UNKNOWN,
        misreported("run_ended", exits={}),
    ),
    CommandDamage("the node's journal is missing", _UNKNOWN, without_file("node0")),
    CommandDamage(
        "the node does not tell that it started the command", _UNKNOWN, without("command_started")
    ),
    CommandDamage(
        "the node does not tell how the command ended", _UNKNOWN, without("command_exited")
    ),
    CommandDamage("the node and the harness tell of two ends", _UNKNOWN, ended_otherwise),
    CommandDamage("the node tells of no rank", _UNKNOWN, without("rank_found")),
    CommandDamage("the node does not tell that the rank ended", _UNKNOWN, without("rank_gone")),
    CommandDamage("the node ran another command", _ERROR, another_command),
    CommandDamage("the node's journal is of another run", _UNKNOWN, node_of_another_run),
    CommandDamage("there is no evidence", _UNKNOWN, without("evidence")),
    CommandDamage("the injection is missing", _UNKNOWN, without("injected")),
    CommandDamage("nothing tells whether the fault was undone", _UNKNOWN, without("undone")),
    CommandDamage("the fault struck another rank", _ERROR, misreported("injected", rank=0)),
    CommandDamage("the fault struck the process of another rank", _ERROR, struck_the_other_rank),
    CommandDamage(
        "the fault struck at an earlier step", _ERROR, misreported("injected", step=AT - 5)
    ),
    CommandDamage("the fault struck at a later step", _ERROR, struck_later),
    CommandDamage(
        "the fault struck on another node", _ERROR, misreported("injected", node="node1")
    ),
    CommandDamage("the fault struck another process", _ERROR, misreported("injected", pid=1)),
    CommandDamage("the evidence is older than the act", _ERROR, seen_before_it_acted),
    CommandDamage("a line of the log is not in the journal", _UNKNOWN, unread(one_line)),
    CommandDamage("no line of the log is in the journal", _UNKNOWN, unread(every_line)),
    CommandDamage(
        "the journal hides the steps that were shown again", _UNKNOWN, unread(shown_again)
    ),
    CommandDamage(
        "the journal hides what was shown after the fault", _UNKNOWN, unread(after_the_fault)
    ),
    CommandDamage("a line of the journal is not in the log", _UNKNOWN, erased(one_line)),
    CommandDamage("the log hides the steps that were shown again", _UNKNOWN, erased(shown_again)),
    CommandDamage("the log is cut", _UNKNOWN, cut),
    CommandDamage("the log is missing", _UNKNOWN, lambda files: files.logs.clear()),
    CommandDamage("the log is that of another run", _UNKNOWN, of_another_run),
    CommandDamage("one line of many has a loss", _UNKNOWN, without_losses(1)),
    CommandDamage("no line has a loss", _UNKNOWN, without_losses(0)),
    CommandDamage("a fifth of the steps was never shown", _UNKNOWN, never_shown(of_many_steps)),
    CommandDamage("the last steps were never shown", _FAILED, never_shown(of_the_last_steps)),
    CommandDamage("a loss is another one", _FAILED, another_loss),
    CommandDamage("what the unbroken run showed is missing", _UNKNOWN, without_twin),
    CommandDamage("it is compared with the twin of another run", _UNKNOWN, twin_of_another_run),
    CommandDamage("it is compared with itself", _ERROR, compared_with_itself),
)
