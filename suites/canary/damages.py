"""Mistakes in what is written of a run, each with the verdict that it must have. All of them once ended as passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaoskit import Verdict
from chaoskit.suites.canary.journals import Journals, Plain

Change = Callable[[Journals], None]


@dataclass(frozen=True)
class Damage:
    """A mistake in the journals of a run in which rank 1 is killed in step :data:`AT`.

    Attributes:
        name: in words.
        verdict: that the run has with it.
    """

    name: str
    verdict: Verdict
    change: Change


#: The step in which rank 1 is killed.
AT = 4


def without(*events: str, of: str = "") -> Change:
    """No record of these events is written; with ``of`` only by ``victim``, ``survivor`` or ``heir`` (of its rank)."""

    def change(journals: Journals) -> None:
        source = _name(journals, of) if of else ""
        journals.drop(lambda where, one: one["event"] in events and source in ("", where))

    return change


def without_last(event: str, *, of: str = "") -> Change:
    """The last record of this event is not written, by one of them, or by any."""

    def change(journals: Journals) -> None:
        last: dict[str, Plain] = {
            where: one
            for where, one in journals.of(event)
            if not of or where == _name(journals, of)
        }
        journals.drop(lambda where, one: last.get(where) is one)

    return change


def without_file(of: str) -> Change:
    """A process writes nothing at all: ``coordinator``, ``harness``, ``agents``, or one of the ranks."""

    def change(journals: Journals) -> None:
        if of == "agents":
            gone = {where for where, _ in journals.of("worker_started")}
        else:
            gone = {of if of in journals.files else _name(journals, of)}
        for source in gone:
            del journals.files[source]

    return change


def without_end(of: str) -> Change:
    """The last five records of a file are not there, as if its process had stopped to write."""

    def change(journals: Journals) -> None:
        for source in [_name(journals, of)] if of != "all" else _ranks(journals):
            del journals.files[source][-5:]

    return change


def told(**fields: object) -> Change:
    """The harness says something else of what it struck."""

    def change(journals: Journals) -> None:
        journals.first("injected").update(fields)

    return change


def struck_another_worker(journals: Journals) -> None:
    """It names a worker of another rank."""
    survivor = _name(journals, "survivor")
    journals.first("injected")["worker"] = survivor


def counted_from_detection(journals: Journals) -> None:
    """The time of the recovery begins when the loss was noticed."""
    injected, detected = journals.first("injected"), journals.first("detected")
    injected["t_ns"] = injected["done_ns"] = detected["t_ns"] + 1_000_000


def seen_before_it_acted(journals: Journals) -> None:
    """Evidence that is older than the act."""
    journals.first("evidence")["t_ns"] = journals.first("injected")["t_ns"] - 1_000_000


def _victim(journals: Journals) -> str:
    return str(journals.first("injected")["worker"])


def _ranks(journals: Journals) -> list[str]:
    plans = sorted((one for _, one in journals.of("plan")), key=lambda one: int(one["generation"]))
    return [str(member["worker"]) for member in plans[-1]["members"]]


def _name(journals: Journals, which: str) -> str:
    first = journals.first("plan")["members"]
    if which == "victim":
        return _victim(journals)
    if which == "heir":
        return next(
            name for name in _ranks(journals) if name not in {member["worker"] for member in first}
        )
    return next(str(member["worker"]) for member in first if member["worker"] != _victim(journals))


_UNKNOWN, _ERROR = Verdict.UNKNOWN, Verdict.ERROR

DAMAGES: tuple[Damage, ...] = (
    Damage(
        "the last commit of the rank that was killed is missing",
        _UNKNOWN,
        without_last("commit", of="victim"),
    ),
    Damage(
        "a commit of a rank that lived on is missing",
        _UNKNOWN,
        without_last("commit", of="survivor"),
    ),
    Damage("the last commits of all ranks are missing", _UNKNOWN, without_last("commit")),
    Damage("commits of one rank are missing", _UNKNOWN, without("commit", of="survivor")),
    Damage("commits of all ranks are missing", _UNKNOWN, without("commit")),
    Damage("one rank contributes to no step", Verdict.FAILED, without("reduce", of="survivor")),
    Damage("plans are missing", _UNKNOWN, without("plan")),
    Damage("the last plan is missing", _UNKNOWN, without_last("plan")),
    Damage("restores are missing", _UNKNOWN, without("restored", "adopt")),
    Damage("a rank's end is missing", _UNKNOWN, without_end("survivor")),
    Damage("the ends of all ranks are missing", _UNKNOWN, without_end("all")),
    Damage("no rank says that it finished", Verdict.FAILED, without("finished")),
    Damage("one rank does not say that it finished", _UNKNOWN, without("finished", of="survivor")),
    Damage("no rank describes its final state", _UNKNOWN, without("state")),
    Damage("no rank was ready", _UNKNOWN, without("ready")),
    Damage("the coordinator does not tell of the loss", _UNKNOWN, without("detected")),
    Damage("no node tells that it started workers", _UNKNOWN, without("worker_started")),
    Damage("the job's end is missing", _UNKNOWN, without("job_ended")),
    Damage("the coordinator's journal is missing", _UNKNOWN, without_file("coordinator")),
    Damage("the agents' journals are missing", _UNKNOWN, without_file("agents")),
    Damage("the journal of a rank that lived on is missing", _UNKNOWN, without_file("survivor")),
    Damage("the journal of the rank that was killed is missing", _UNKNOWN, without_file("victim")),
    Damage("the journal of its replacement is missing", _UNKNOWN, without_file("heir")),
    Damage("the harness's journal is missing", _ERROR, without_file("harness")),
    Damage("the harness wrote no end", _ERROR, without("run_ended")),
    Damage("there is no evidence", _UNKNOWN, without("evidence")),
    Damage("nothing tells whether the fault was undone", _UNKNOWN, without("undone")),
    Damage("no rank says that it stood where the fault was due", _UNKNOWN, without("hook_stopped")),
    Damage("the fault struck another rank", _ERROR, told(rank=2)),
    Damage("the fault struck in another step", _ERROR, told(step=AT - 2)),
    Damage("the fault struck on another node", _ERROR, told(node="node0")),
    Damage("the fault struck another process", _ERROR, told(pid=1)),
    Damage("the fault struck another worker", _ERROR, struck_another_worker),
    Damage("the recovery is counted from the detection", _ERROR, counted_from_detection),
    Damage("the evidence is older than the act", _ERROR, seen_before_it_acted),
)
