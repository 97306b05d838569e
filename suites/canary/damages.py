"""Mistakes in the journals of a run, each with the verdict that it must have.

All of them once ended as passed.

-> suites/canary/test_journals.py makes each and judges the run again.
-> experiment/judge/coverage.py finds missing records; experiment/judge/fault_audit.py wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaoskit import Verdict
from chaoskit.suites.canary.journals import Journals, Plain

Change = Callable[[Journals], None]


@dataclass(frozen=True)
class Damage:
    """Mistake in the journals of a run in which rank 1 is killed in step :data:`AT`.

    Attributes:
        name: name in words.
        verdict: verdict of the run with it.
        change: function that makes it.
    """

    name: str
    verdict: Verdict
    change: Change


#: Step in which rank 1 is killed.
AT = 4


def without(*events: str, of: str = "") -> Change:
    """Return a change that drops all records of these events.

    ``of`` limits it to ``victim``, ``survivor`` or ``heir`` (the replacement of the victim); "" for
    all processes.
    """

    def change(journals: Journals) -> None:
        source = _worker_of(journals, of) if of else ""
        journals.drop(lambda writer, record: record["event"] in events and source in ("", writer))

    return change


def without_last(event: str, *, of: str = "") -> Change:
    """Return a change that drops the last record of an event in the journal of each process.

    ``of`` limits it to one process, as in :func:`without`.
    """

    def change(journals: Journals) -> None:
        last: dict[str, Plain] = {
            writer: record
            for writer, record in journals.of(event)
            if not of or writer == _worker_of(journals, of)
        }
        journals.drop(lambda writer, record: last.get(writer) is record)

    return change


def without_file(of: str) -> Change:
    """Return a change that drops all records of a process.

    The process is ``coordinator``, ``harness``, all ``agents``, or a rank as in :func:`without`.
    """

    def change(journals: Journals) -> None:
        if of == "agents":
            dropped = {writer for writer, _ in journals.of("worker_started")}
        else:
            dropped = {of if of in journals.files else _worker_of(journals, of)}
        for source in dropped:
            del journals.files[source]

    return change


def without_end(of: str) -> Change:
    """Return a change that drops the last five records of a file, as if its process had stopped.

    The file is that of a rank, as in :func:`without`, or of ``all`` ranks of the last membership.
    """

    def change(journals: Journals) -> None:
        for source in [_worker_of(journals, of)] if of != "all" else _ranks(journals):
            del journals.files[source][-5:]

    return change


def misreported(**fields: object) -> Change:
    """Return a change that sets ``fields`` in the harness's report of what it struck."""

    def change(journals: Journals) -> None:
        journals.first("injected").update(fields)

    return change


def struck_another_worker(journals: Journals) -> None:
    """Name a worker of another rank as the one that was struck."""
    survivor = _worker_of(journals, "survivor")
    journals.first("injected")["worker"] = survivor


def counted_from_detection(journals: Journals) -> None:
    """Let the time of the recovery begin when the loss was noticed."""
    injected, detected = journals.first("injected"), journals.first("detected")
    injected["t_ns"] = injected["done_ns"] = detected["t_ns"] + 1_000_000


def seen_before_it_acted(journals: Journals) -> None:
    """Make the evidence older than the act."""
    journals.first("evidence")["t_ns"] = journals.first("injected")["t_ns"] - 1_000_000


def _victim(journals: Journals) -> str:
    """Return the worker that the fault struck."""
    return str(journals.first("injected")["worker"])


def _ranks(journals: Journals) -> list[str]:
    """Return the workers of the last membership, in the order of their ranks."""
    plans = sorted(
        (plan for _, plan in journals.of("plan")), key=lambda plan: int(plan["generation"])
    )
    return [str(member["worker"]) for member in plans[-1]["members"]]


def _worker_of(journals: Journals, role: str) -> str:
    """Return the worker that is the ``victim``, its ``heir``, or the first survivor."""
    first = journals.first("plan")["members"]
    if role == "victim":
        return _victim(journals)
    if role == "heir":
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
    Damage("the fault struck another rank", _ERROR, misreported(rank=2)),
    Damage("the fault struck in another step", _ERROR, misreported(step=AT - 2)),
    Damage("the fault struck on another node", _ERROR, misreported(node="node0")),
    Damage("the fault struck another process", _ERROR, misreported(pid=1)),
    Damage("the fault struck another worker", _ERROR, struck_another_worker),
    Damage("the recovery is counted from the detection", _ERROR, counted_from_detection),
    Damage("the evidence is older than the act", _ERROR, seen_before_it_acted),
)
