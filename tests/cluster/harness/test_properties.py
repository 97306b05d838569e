"""Each property of a resilient run is violated on purpose, and the violation is noticed.

``SABOTAGED`` holds real runs of a job that breaks the runtime from inside. In some of them
a fault strikes while the protection against it is off. ``DOCTORED`` changes the journals of a real,
healthy run, where only another coordinator could violate the property. The property holds before
the change.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit.checkpoint.layout.arena import DATA_OFFSET
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.properties import LEFT_OUT, PROPERTIES, RunTrace, check_properties
from chaoskit.experiment.run.recovery_timeline import Timeline
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Sealed
from faults import (
    BitFlip,
    ClockJump,
    CrashLoop,
    Deadlock,
    FailLoad,
    Fault,
    Kill,
    KillCoordinator,
    NaN,
    Straggle,
)

JOB = str(Path(__file__).parents[2] / "jobs" / "wrong" / "sabotage.py")
AT = 8  # as in the job
WEIGHT = "3.weight"
KILL = Kill(rank=1, at_step=AT)
PAGE = Path(__file__).parents[3] / "docs" / "properties.md"


def damage_copies(message: Any) -> None:
    """Change one byte of every sealed copy."""
    if isinstance(message, Sealed):
        for snapshot in message.snapshots:
            with Path(f"/proc/{snapshot.endpoint.pid}/fd/{snapshot.endpoint.arena_fd}").open(
                "r+b", 0
            ) as memory:
                memory.seek(DATA_OFFSET + 5)
                byte = memory.read(1)[0]
                memory.seek(DATA_OFFSET + 5)
                memory.write(bytes([byte ^ 1]))


def _kind(fault: Fault) -> str:
    return fault.kind


@dataclass(frozen=True)
class Sabotage:
    """A run that violates the properties ``labels``.

    Attributes:
        how: the sabotaging function of the job, or the protection that is off.
    """

    labels: tuple[str, ...]
    how: str = "none"
    faults: tuple[Fault, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    twin: bool = False
    watch: Callable[[Any], None] = lambda message: None


_UNGUARDED = {"hash_every": 0, "state_hash_steps": 0}

SABOTAGED = {
    "skips a shard": Sabotage(("1S",), "skips_a_shard"),
    "leaves late": Sabotage(
        ("1L",), "leaves_late", (KILL,), {"collective_timeout_s": 4.0, "outside_limit_s": 4.0}
    ),
    "looks busy for ever": Sabotage(
        ("2L",),
        "looks_busy_for_ever",
        (Deadlock(rank=1, at_step=AT),),
        {"deadline_s": 50.0, "nodes": 2},
    ),
    "declares nothing": Sabotage(("3S",), "evaluates"),
    "is slandered": Sabotage(
        ("4S",), "is_slandered", (Straggle(rank=1, at_step=AT - 1, delay_ms=10, steps=2),)
    ),
    "spares the guilty": Sabotage(
        ("6L",),
        "spares_the_guilty",
        (NaN(rank=1, at_step=AT, parameter=WEIGHT, where="weight"),),
        {"deadline_s": 20.0},
    ),
    "ignores new generations": Sabotage(("9S",), "ignores_new_generations", (KILL,)),
    "takes two steps": Sabotage(("10S",), "takes_two_steps", (), _UNGUARDED),
    "samples anew": Sabotage(("16S", "24S"), "samples_anew", (KILL,), twin=True),
    "trusts any copy": Sabotage(
        ("19S",),
        "trusts_any_copy",
        (Kill(rank="all", at_step=AT, phase="reduce"),),
        {"nodes": 2},
        watch=damage_copies,
    ),
    "does not compare": Sabotage(
        ("21L",),
        "does_not_compare",
        (BitFlip(rank=1, at_step=AT, parameter=WEIGHT, bit=23, where="optimizer"),),
        {"state_hash_steps": 1},
    ),
    "does not hear its verdict": Sabotage(
        ("21S",),
        "does_not_hear_its_verdict",
        (BitFlip(rank=1, at_step=AT, parameter=WEIGHT, bit=23, where="optimizer"),),
        {"state_hash_steps": 1},
    ),
    "goes back a step": Sabotage(
        ("35S",),
        "goes_back_a_step",
        (Kill(rank=1, at_step=AT, phase="reduce"),),
        {**_UNGUARDED, "spares": 0, "deadline_s": 30.0},
    ),
    "commits what it likes": Sabotage(("22S",), "commits_what_it_likes"),
    "does not look at numbers": Sabotage(
        ("23S",),
        "does_not_look_at_numbers",
        (NaN(rank=1, at_step=AT, parameter=WEIGHT),),
        _UNGUARDED,
    ),
    "seeds by process": Sabotage(("25S",), "seeds_by_process", (KILL,), twin=True),
    "forgets momentum": Sabotage(
        ("26S",), "forgets_momentum", (KILL,), _UNGUARDED | {"until": {"spares": 1}}
    ),
    "deals half twice": Sabotage(("39S",), "deals_half_twice", (KILL,)),
    "shrinks the batch": Sabotage(("27S",), "shrinks_the_batch", (KILL,)),
    "believes the clock": Sabotage(
        ("28S",),
        "believes_the_clock",
        (ClockJump(rank=1, at_step=AT, seconds=3600.0),),
        {"nodes": 2},
    ),
    "skips the rehearsal": Sabotage(("32S",), "skips_the_rehearsal"),
    "computes otherwise": Sabotage(("37S",), "computes_otherwise"),
}


def settings_of(plan: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": 3, "spares": 1, "steps": 20, "deadline_s": 120.0} | plan


def execute(chaos: Chaos, sabotage: Sabotage, **plan: Any) -> tuple[RawRun, Outcome]:
    settings, watch = chaos.limits | settings_of(sabotage.plan | plan), sabotage.watch
    if any(isinstance(fault, KillCoordinator) for fault in sabotage.faults):
        watch = goal = happened(chaos, Event.RESUMED)
        settings["until"] = goal.until
    options = {"how": sabotage.how, **settings.pop("options", {})}
    experiment = plan_experiment(JOB, faults=sabotage.faults, options=options, **settings)
    twin = chaos.harness.twin(experiment) if sabotage.twin else None
    run = chaos.harness._execute(experiment, watch, 0)
    return run, judge(run, twin, "local")


def verdicts(run: RawRun, outcome: Outcome | None = None) -> dict[str, Verdict]:
    """Return label -> verdict of the properties that apply."""
    history = History(run.records)
    timeline = Timeline(run, history)
    recoveries = [
        recovery
        for incident in timeline.incidents()[0]
        if (recovery := timeline.recovery(incident))
    ]
    checks = check_properties(RunTrace(run, history, recoveries), outcome.checks if outcome else ())
    return {prop.label: check.verdict for prop, check in checks}


@pytest.mark.promise(
    "No step is committed unless every shard came in exactly once, from a member of the generation.",
    name="skips a shard",
)
@pytest.mark.promise(
    "Every step number is committed with one result, on all ranks.", name="takes two steps"
)
@pytest.mark.promise(
    "The samples of the committed steps are those of the unbroken run, each once.",
    name="samples anew",
)
@pytest.mark.promise(
    "A flipped bit of the state, or of what was received, is found and its rank is named.",
    name="does not compare",
)
@pytest.mark.promise(
    "The reduced gradient has the same checksum on all ranks that commit it.",
    name="commits what it likes",
)
@pytest.mark.promise(
    "Every step has the same number of samples at every world size", name="shrinks the batch"
)
@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(chaos: Chaos, name: str) -> None:
    sabotage = SABOTAGED[name]
    run, outcome = execute(chaos, sabotage)
    verdict_of = verdicts(run, outcome)
    assert {label: verdict_of.get(label) for label in sabotage.labels} == dict.fromkeys(
        sabotage.labels, Verdict.FAILED
    ), (
        outcome.reasons,
        run.directory,
    )
    assert outcome.verdict == Verdict.FAILED


@pytest.mark.parametrize(
    "faults",
    {sabotage.faults: None for sabotage in SABOTAGED.values()},
    ids=lambda faults: "+".join(map(_kind, faults)),
)
def test_the_same_faults_without_sabotage_violate_nothing(
    chaos: Chaos, faults: tuple[Fault, ...]
) -> None:
    """The faults alone violate nothing, so the sabotage was noticed above."""
    plan = {"nodes": 2} if any(fault.rank == "all" for fault in faults) else {}
    run, outcome = execute(
        chaos, Sabotage((), "none", faults, plan | {"state_hash_steps": 1}, twin=True)
    )
    assert outcome.verdict == Verdict.PASSED, (outcome.reasons, run.directory)
    assert set(verdicts(run, outcome).values()) == {Verdict.PASSED}


# -- journals that were doctored -------------------------------------------------------------------

Doctor = Callable[[RawRun], RawRun]

BLIND = Sabotage(
    (), "none", (KillCoordinator(rank=0, at_step=AT),), {"nodes": 2, "spares": 0, "steps": 40}
)
COPIES = Sabotage((), "none", (Kill(rank="all", at_step=AT, phase="reduce"),), {"nodes": 2})
CONVICTED = Sabotage(
    (),
    "none",
    (BitFlip(rank=1, at_step=AT, parameter=WEIGHT, bit=23, where="optimizer"),),
    {"state_hash_steps": 1},
)
BAD_NODE = Sabotage(
    (),
    "none",
    (CrashLoop(rank=1, at_step=AT, times=2),),
    {"spares": 0, "until": {"world": 3}, "strikes_max": 2},
)
BAD_SPARE = Sabotage(
    (),
    "none",
    (FailLoad(rank=1, at_step=3), Kill(rank=1, at_step=AT)),
    {"nodes": 2, "spares": 0, "until": {"world": 2}},
)


def rewritten(run: RawRun, records: Sequence[Record]) -> RawRun:
    """Return a copy of the run with other journals."""
    copy = dataclasses.replace(run)
    copy.__dict__["records"] = sorted(records, key=lambda record: record.t_ns)
    return copy


def changed(record: Record, **fields: Any) -> Record:
    return msgspec.structs.replace(record, fields=record.fields | fields)


def edit(event: Event, change: Callable[[list[Record]], list[Record]]) -> Doctor:
    """Return a function that replaces all records of ``event`` in a run."""

    def doctor(run: RawRun) -> RawRun:
        others = [record for record in run.records if record.event != event]
        return rewritten(
            run, others + change([record for record in run.records if record.event == event])
        )

    return doctor


def late(first: Callable[[Record], bool], seconds: float) -> Doctor:
    """Return a function that delays all records after the first for which ``first`` is true."""

    def doctor(run: RawRun) -> RawRun:
        from_ns = next(record.t_ns for record in run.records if first(record))
        moved = [
            msgspec.structs.replace(record, t_ns=record.t_ns + int(seconds * 1e9))
            if record.t_ns > from_ns
            else record
            for record in run.records
        ]
        return rewritten(run, moved)

    return doctor


def last_generation_is_the_first(plans: list[Record]) -> list[Record]:
    return [*plans[:-1], changed(plans[-1], generation=1)]


def another_took_an_older_copy(restored: list[Record]) -> list[Record]:
    return [*restored, changed(restored[0], step=restored[0]["step"] - 1)]


def fewer_losses_were_allowed(run: RawRun) -> RawRun:
    config = msgspec.structs.replace(run.experiment.config, max_failures=1)
    return dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, config=config))


def nobody_was_started_again(run: RawRun) -> RawRun:
    failed_ns = next(r.t_ns for r in run.records if r.event == Event.FAILED)
    left = [r for r in run.records if r.event != Event.WORKER_STARTED or r.t_ns < failed_ns]
    ended = [r for r in left if r.event == Event.JOB_ENDED]
    others = [r for r in left if r.event != Event.JOB_ENDED]
    return rewritten(
        run, [*others, *(msgspec.structs.replace(r, t_ns=r.t_ns + int(60e9)) for r in ended)]
    )


def joiner_entered_too_early(run: RawRun) -> RawRun:
    grown = _grown(run)["generation"]
    first = min(record["step"] for record in _commits(run, grown))
    moved = [
        changed(r, step=first - 1) if r in _commits(run, grown, first) else r for r in run.records
    ]
    return rewritten(run, moved)


def _grown(run: RawRun) -> Record:
    plans = [record for record in run.records if record.event == Event.PLAN and not record["abort"]]
    return next(plan for plan in plans if any(_commits(run, plan["generation"])))


def _commits(run: RawRun, generation: int, step: int | None = None) -> list[Record]:
    return [
        record
        for record in run.records
        if record.event == Event.COMMIT
        and record["generation"] == generation
        and (step is None or record["step"] == step)
    ]


#: Name -> (label of the violated property, the healthy run, the change of its journals).
DOCTORED: dict[str, tuple[str, Sabotage, Doctor]] = {
    "a generation comes again": ("8S", BAD_NODE, edit(Event.PLAN, last_generation_is_the_first)),
    "a coordinator has forgotten": (
        "11S",
        BLIND,
        edit(Event.RESUMED, lambda records: [changed(record, generation=0) for record in records]),
    ),
    "no coordinator for a long time": (
        "12L",
        BLIND,
        late(lambda record: record.event == Event.INJECTED, 100.0),
    ),
    "copies of two steps": ("14S", COPIES, edit(Event.RESTORED, another_took_an_older_copy)),
    "a recovery of minutes": (
        "16L",
        CONVICTED,
        late(lambda record: record.event == Event.CORRUPT, 200.0),
    ),
    "a bad node is not set aside": ("17L", BAD_NODE, edit(Event.SET_ASIDE, lambda records: [])),
    "more losses than allowed": ("17S", BAD_NODE, fewer_losses_were_allowed),
    "nobody is started again": ("32L", BAD_SPARE, nobody_was_started_again),
    "a joiner enters too early": ("33S", BAD_NODE, joiner_entered_too_early),
    "a group that takes minutes": (
        "36L",
        CONVICTED,
        late(lambda record: record.event == Event.PLAN and record["generation"] == 2, 100.0),
    ),
    "ranks wait for the monitor": (
        "38S",
        BLIND,
        late(lambda record: record.event == Event.INJECTED, 100.0),
    ),
}

_healthy: dict[int, RawRun] = {}


@pytest.mark.promise(
    "The numbers of memberships strictly increase, over all coordinators.",
    name="a generation comes again",
)
@pytest.mark.promise(
    "A coordinator has a higher term than those before it, and knows every generation that they decided.",
    name="a coordinator has forgotten",
)
@pytest.mark.promise(
    "A node that loses worker after worker is given no more of them.",
    name="a bad node is not set aside",
)
@pytest.mark.promise(
    "A job that lost more workers than it may does not end well.", name="more losses than allowed"
)
@pytest.mark.parametrize("name", DOCTORED)
def test_doctored_journals_are_caught(chaos: Chaos, name: str) -> None:
    label, sabotage, doctor = DOCTORED[name]
    if id(sabotage) not in _healthy:
        run, outcome = execute(chaos, sabotage)
        assert outcome.verdict == Verdict.PASSED, (outcome.reasons, run.directory)
        _healthy[id(sabotage)] = run
    run = _healthy[id(sabotage)]
    assert verdicts(run)[label] == Verdict.PASSED
    assert verdicts(doctor(run))[label] == Verdict.FAILED


def test_a_world_that_went_back_commits_its_steps_anew_before_it_grows(chaos: Chaos) -> None:
    """A joiner that enters early is no violation if the world before began with an older copy."""
    run, _ = execute(chaos, BAD_NODE)
    early = rewritten(run, joiner_entered_too_early(run).records)
    assert verdicts(early)["33S"] == Verdict.FAILED
    plan = _grown(run)
    copied = {
        "generation": plan["generation"],
        "step": 0,
        "source": "node0.0 of node0",
        "checksum": "",
        "size_bytes": 0,
    }
    restored = msgspec.structs.replace(plan, event=Event.RESTORED, fields=copied)
    assert verdicts(rewritten(early, [*early.records, restored]))["33S"] == Verdict.PASSED


# -- nothing is forgotten --------------------------------------------------------------------------


def violations() -> dict[str, str]:
    """Return label -> name of the run that violates it."""
    names = {label: name for name, sabotage in SABOTAGED.items() for label in sabotage.labels}
    return names | {label: name for name, (label, _, _) in DOCTORED.items()}


def test_every_property_has_a_run_that_violates_it() -> None:
    assert set(violations()) == {prop.label for prop in PROPERTIES}
    assert len({prop.label for prop in PROPERTIES}) == len(PROPERTIES)


def test_every_row_is_there_or_left_out_with_a_reason() -> None:
    rows = {prop.number for prop in PROPERTIES}
    assert rows | set(LEFT_OUT) == set(range(1, 40))
    assert not rows & set(LEFT_OUT)
    assert all(prop.sentence and (prop.kind == "safety") == (not prop.bound) for prop in PROPERTIES)


def page() -> str:
    """Return the tables that ``docs/properties.md`` must contain."""
    doctored = set(DOCTORED)
    lines = ["| # | kind | property | check | bound | violated by |", "|---|---|---|---|---|---|"]
    for prop in PROPERTIES:
        name = violations()[prop.label]
        run = f"{name} (doctored)" if name in doctored else name
        cells = [
            prop.label,
            prop.kind,
            prop.sentence,
            prop.shown_by or prop.name,
            prop.bound or "never",
            run,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| # | shown by |", "|---|---|"]
    lines += [f"| {number} | {reason} |" for number, reason in LEFT_OUT.items()]
    return "\n".join(lines)


def test_the_page_is_up_to_date() -> None:
    """The page contains the tables of :func:`page`; copy them after a change."""
    written = PAGE.read_text()
    tables = [line for line in written.splitlines() if re.match(r"\|", line)]
    assert tables == [line for line in page().splitlines() if line]


def test_what_is_left_out_is_shown_by_tests_that_exist() -> None:
    """A row without a property names the files of its tests."""
    root = PAGE.parent.parent
    for reason in LEFT_OUT.values():
        files = re.findall(r"`([^`]+)`", reason)
        assert files
        assert all((root / file).is_file() for file in files)


@pytest.mark.promise("In an outcome, the properties that hold share one line")
def test_the_outcome_tells_what_holds(chaos: Chaos) -> None:
    """The properties that hold share one line; each that is violated has a line of its own."""
    outcome = chaos.run(JOB, nodes=2, spares=1, steps=20, faults=[KILL], twin=False)
    (line,) = [check for check in outcome.checks if check.name == "properties"]
    assert line.detail.startswith(f"{len(line.detail.split(': ')[1].split(', '))} hold: 1S, 1L, ")
    assert not [check for check in outcome.checks if check.name.startswith("property ")]
