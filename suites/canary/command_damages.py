"""Mistakes in what is written of a command's run: in journals, in logs, and in what its unbroken run showed."""

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

#: The step at which rank 1 is killed.
AT = 25
#: Steps of the run.
STEPS = 100
_RANKS = 2
_LATE_NS = 3_600_000_000_000


class Written:
    """Everything that is written of one run, in a copy of its directory.

    Attributes:
        journals: by source.
        logs: lines of each node's log.
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
        """Write all of it anew; what is not there any more is deleted."""
        self.journals.write()
        shutil.rmtree(self._run / "log")
        (self._run / "log").mkdir()
        for name, lines in self.logs.items():
            (self._run / "log" / name).write_text("".join(lines))
        (self._run / "twin.json").unlink()
        if self.twin is not None:
            (self._run / "twin.json").write_text(json.dumps(self.twin))

    @property
    def shown(self) -> list[Plain]:
        """What the harness read in the logs, in its order."""
        return [one for _, one in self.journals.of("logged")]

    def forget(self, gone: list[Plain]) -> None:
        """The harness has not read these lines."""
        places = {id(one) for one in gone}
        self.journals.drop(lambda _, one: id(one) in places)

    def erase(self, gone: list[Plain]) -> None:
        """The log has not these lines: each is the one with its number among those that show a step."""
        places = {id(one) for one in gone}
        kept = iter([id(one) not in places for one in self.shown])
        for name, lines in self.logs.items():
            self.logs[name] = [line for line in lines if not _step(line) or next(kept)]


Change = Callable[[Written], None]


@dataclass(frozen=True)
class CommandDamage:
    """A mistake in what is written of a run in which rank 1 is killed at step :data:`AT`, and both ranks come back.

    Attributes:
        name: in words.
        verdict: that the run has with it.
    """

    name: str
    verdict: Verdict
    change: Change


def _step(line: str) -> re.Match[str] | None:
    return re.search(r"step \d+ loss", line)


# -- which lines --------------------------------------------------------------------------------------------------

Some = Callable[[Written], list[Plain]]


def one_line(written: Written) -> list[Plain]:
    """A line in the middle."""
    return written.shown[len(written.shown) // 2 : len(written.shown) // 2 + 1]


def of_the_last_steps(written: Written) -> list[Plain]:
    """The last tenth of the steps."""
    return [one for one in written.shown if one["step"] >= STEPS - STEPS // 10]


def of_many_steps(written: Written) -> list[Plain]:
    """A fifth of the steps, all of them before the fault."""
    return [one for one in written.shown if one["step"] < STEPS // 5 and one["step"] > 0]


def shown_again(written: Written) -> list[Plain]:
    """What the second attempt repeats."""
    seen = Counter[int]()
    again = []
    for one in written.shown:
        seen[one["step"]] += 1
        if seen[one["step"]] > _RANKS:
            again.append(one)
    return again


def after_the_fault(written: Written) -> list[Plain]:
    """All that was shown from the fault on."""
    struck_ns = written.journals.first("injected")["t_ns"]
    return [one for one in written.shown if one["t_ns"] > struck_ns]


def every_line(written: Written) -> list[Plain]:
    """All."""
    return written.shown


# -- what becomes of them -----------------------------------------------------------------------------------------


def unread(which: Some) -> Change:
    """The log has them, and the harness's journal has not."""
    return lambda written: written.forget(which(written))


def erased(which: Some) -> Change:
    """The harness's journal has them, and the log has not."""
    return lambda written: written.erase(which(written))


def never_shown(which: Some) -> Change:
    """Neither has them."""

    def change(written: Written) -> None:
        gone = which(written)
        written.erase(gone)
        written.forget(gone)
        _recount(written)

    return change


def without_losses(left: int) -> Change:
    """Log and journal agree on a loss of so many lines."""

    def change(written: Written) -> None:
        for one in written.shown[left:]:
            one["loss"] = None
        for lines in written.logs.values():
            lines[left:] = [line.replace("loss", "cost") for line in lines[left:]]

    return change


def another_loss(written: Written) -> None:
    """Log and journal agree on another number."""
    (one,) = one_line(written)
    number = [id(other) for other in written.shown].index(id(one))
    for lines in written.logs.values():
        lines[number] = re.sub(r"loss \S+", "loss 7.5", lines[number])
    one["loss"] = "7.5"


def cut(written: Written) -> None:
    """The second half of each log is not there."""
    written.logs = {name: lines[: len(lines) // 2] for name, lines in written.logs.items()}


def of_another_run(written: Written) -> None:
    """The log is that of a run with other losses."""
    for name, lines in written.logs.items():
        written.logs[name] = [line.replace("loss 0.", "loss 0.1") for line in lines]


def _recount(written: Written) -> None:
    lines = [line for lines in written.logs.values() for line in lines if line.strip()]
    written.journals.first("run_ended")["logs"]["lines"] = len(lines)


# -- journals -----------------------------------------------------------------------------------------------------


def without(*events: str) -> Change:
    """No record of these events is written."""
    return lambda written: written.journals.drop(lambda _, one: one["event"] in events)


def without_file(source: str) -> Change:
    """A process writes nothing at all."""

    def change(written: Written) -> None:
        del written.journals.files[source]

    return change


def without_starts_again(written: Written) -> None:
    """The node tells of the first two ranks alone."""
    later = [one for _, one in written.journals.of("rank_found")][_RANKS:]
    written.journals.drop(lambda _, one: any(one is other for other in later))


def told(event: str, **fields: object) -> Change:
    """A record says something else."""
    return lambda written: written.journals.first(event).update(fields)


def struck_later(written: Written) -> None:
    """The harness says that it struck at a later step, and when that was shown."""
    later = next(one for one in reversed(written.shown) if one["step"] == STEPS // 2)
    struck = written.journals.first("injected")
    struck |= {"t_ns": later["t_ns"] + 1, "done_ns": later["t_ns"] + 2, "step": STEPS // 2}
    evidence = written.journals.first("evidence")
    evidence["t_ns"] = later["t_ns"] + 3


def struck_the_other_rank(written: Written) -> None:
    """The harness names the process of rank 0."""
    other = next(one for _, one in written.journals.of("rank_found") if one["rank"] == 0)
    written.journals.first("injected").update(
        {"pid": other["pid"], "worker": f"node0.{other['pid']}"}
    )


def seen_before_it_acted(written: Written) -> None:
    """Evidence that is older than the act."""
    written.journals.first("evidence")["t_ns"] = (
        written.journals.first("injected")["t_ns"] - 1_000_000
    )


def ended_otherwise(written: Written) -> None:
    """The node says that its command ended with status 1, the harness with status 0."""
    written.journals.first("command_exited")["status"] = "status 1"


def another_command(written: Written) -> None:
    """The node ran something else."""
    written.journals.first("command_started")["command"] = ["true"]


def node_of_another_run(written: Written) -> None:
    """The node's records are of another time."""
    for one in written.journals.files["node0"]:
        one["t_ns"] -= _LATE_NS


# -- what it is compared with -------------------------------------------------------------------------------------


def without_twin(written: Written) -> None:
    """What the unbroken run showed is missing."""
    written.twin = None


def twin_of_another_run(written: Written) -> None:
    """It was compared with another one when it was made."""
    assert written.twin is not None
    written.twin["run_id"] = "0" * 32


def compared_with_itself(written: Written) -> None:
    """Run and unbroken run are one: no difference can be found."""
    assert written.twin is not None
    started = written.journals.first("started")
    written.twin["run_id"] = started["twin"] = started["run_id"]


_UNKNOWN, _ERROR, _FAILED = Verdict.UNKNOWN, Verdict.ERROR, Verdict.FAILED

COMMAND_DAMAGES: tuple[CommandDamage, ...] = (
    CommandDamage("the harness's journal is missing", _ERROR, without_file("harness")),
    CommandDamage("the harness wrote no end", _ERROR, without("run_ended")),
    CommandDamage("the harness does not tell that it began", _UNKNOWN, without("started")),
    CommandDamage(
        "the harness does not tell how a command ended", _UNKNOWN, told("run_ended", exits={})
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
    CommandDamage("the fault struck another rank", _ERROR, told("injected", rank=0)),
    CommandDamage("the fault struck the process of another rank", _ERROR, struck_the_other_rank),
    CommandDamage("the fault struck at an earlier step", _ERROR, told("injected", step=AT - 5)),
    CommandDamage("the fault struck at a later step", _ERROR, struck_later),
    CommandDamage("the fault struck on another node", _ERROR, told("injected", node="node1")),
    CommandDamage("the fault struck another process", _ERROR, told("injected", pid=1)),
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
    CommandDamage("the log is missing", _UNKNOWN, lambda written: written.logs.clear()),
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
