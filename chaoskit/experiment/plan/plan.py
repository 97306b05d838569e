"""What is to be run and broken: checked in full before a process is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from chaoskit.config import RunConfig, typed_config, validate
from chaoskit.errors import BadInput, ChaoskitError, name_remedy
from chaoskit.faults.base import Fault, draw_ranks, typed_faults
from chaoskit.job import JobSpec, resolve_job, stated_batches
from chaoskit.rules import load_rules
from chaoskit.typed import LimitS, typed_arguments
from chaoskit.wire.messages import Trigger

#: Whether a run is compared with plain PyTorch.
Wish = Literal["off", "on", "required"]
#: Steps compared with plain PyTorch. A mistake that shows later only is left to the twin, or is one of a recovery.
REFERENCE_STEPS = 8

_SECONDS_A_STEP = 2.0  # generous: a deadline is for runs that never end
#: Arguments of ``chaos.run`` that are no settings of the run.
_ARGUMENTS = (
    *("check", "command", "deadline_s", "faults", "job", "max_lost_steps", "name"),
    *("options", "reference", "steps", "twin", "until", "watch"),
)
_DEADLINE_FLOOR_S = 60.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One run with its faults.

    Attributes:
        name: shown in reports.
        faults: one a rank: roles that stand for several are drawn already.
        job: as the user named it.
        steps: of the job, where its options say so; of an open-ended job the least.
        deadline_s: the run is ended, and has failed, when it takes longer; ``math.inf`` for no deadline.
        max_lost_steps: committed steps that its faults may cost; it has failed if it computed more of them again.
        reference: whether its first steps are compared with those of plain PyTorch: ``off``, ``on`` (where that can be
            had) or ``required`` (without it nothing is known).
        asked: the faults before roles were drawn; empty where that is not known.
    """

    name: str
    job: str
    config: RunConfig
    faults: tuple[Fault, ...]
    steps: int | None
    deadline_s: float
    max_lost_steps: int = 0
    reference: Wish = "off"
    asked: tuple[Fault, ...] = ()

    def triggers(self) -> tuple[Trigger, ...]:
        """Where ranks stop and wait: of the faults for which that can be said before the run."""
        planned = (fault.trigger(fault_id(number)) for number, fault in enumerate(self.faults))
        return tuple(trigger for trigger in planned if trigger is not None)

    @property
    def is_open_ended(self) -> bool:
        """Whether the job goes on, after its steps, until a goal is reached."""
        return "until" in self.config.job.options

    def unbroken(
        self, schedule: tuple[tuple[int, int], ...] = (), steps: int | None = None
    ) -> Experiment:
        """The twin: the same job and seed, without faults and spares, and without rules and limits that could break it.

        Args:
            schedule: of a batch that followed the world: its sizes; see :class:`chaoskit.config.BatchScaling`.
            steps: that an open-ended job took.
        """
        config = msgspec.structs.replace(
            self.config, spares=0, disk=None, remote=None, resume=False, rules=()
        )
        config = config.undisturbed()
        if config.follow is not None:
            named = config.named_shards
            follow = msgspec.structs.replace(
                config.follow, schedule=schedule or ((0, named),), named_shards=named
            )
            alone = {"nodes": 1, "min_world": 1, "elastic": None, "shards": config.shard_count}
            config = msgspec.structs.replace(config, follow=follow, **alone)
        if self.is_open_ended:
            options = {
                name: value for name, value in config.job.options.items() if name != "until"
            } | {"steps": steps or self.steps}
            config = msgspec.structs.replace(
                config, job=msgspec.structs.replace(config.job, options=options)
            )
        return Experiment(
            f"{self.name} (twin)", self.job, config, (), steps or self.steps, self.deadline_s
        )


def fault_id(number: int) -> str:
    """Name of the n-th fault of an experiment, in messages and journals."""
    return f"fault{number}"


@typed_arguments
def plan_experiment(
    job: str,
    *,
    name: str = "",
    steps: int | None = None,
    until: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    faults: Sequence[Fault] = (),
    deadline_s: LimitS | None = None,
    max_lost_steps: int | None = None,
    reference: Wish = "off",
    **settings: Any,
) -> Experiment:
    """Check and assemble an experiment.

    Args:
        job: name of a reference job (``gpt``), file, or ``file.py:function``.
        steps: passed to the job as its option ``steps``.
        until: passed to the job as its option ``until``: after ``steps`` steps it goes on until this goal is reached;
            see :mod:`chaoskit.fixtures.jobs.goal`. The unbroken run, which has no such option, takes as many steps.
        options: further options of the job's train function.
        faults: what to break.
        deadline_s: default: a minute, the start-up time and two seconds a step. ``math.inf``: none.
        max_lost_steps: committed steps that may be computed again. 0: the step in flight is all that a fault may cost.
            Default: 0; for a sharded job one for each fault, as it goes back to the last step that all have copied.
        reference: compare the first steps with those of plain PyTorch in one process: ``off``, ``on`` where that can
            be had, or ``required``: a run that has no reference is *unknown*.
        settings: fields of :class:`chaoskit.config.RunConfig`, such as ``nodes``, ``spares``, ``seed``; ``rules`` may
            be a file.

    Raises:
        BadInput: naming field, value and remedy. Nothing was started.
    """
    options = dict(options or {})
    if steps is not None:
        if steps < 1:
            raise BadInput("steps", steps, "use 1 or more")
        options["steps"] = steps
    if until is not None:
        if steps is None:
            raise BadInput("until", until, "give steps, too: the least that the job takes")
        options["until"] = until
    require_settings(settings, beside=_ARGUMENTS)
    spec = _resolve(job, options, of_plan={"steps": steps, "until": until})
    if "rules" in settings:
        settings["rules"] = load_rules(settings["rules"])
    config = typed_config(spec, settings)
    validate(config)
    if config.remote is not None:
        from chaoskit.checkpoint.remote.opening import require_store  # imports torch

        require_store("remote", config.remote.target)
    if config.disk is not None and not config.resume:
        _require_empty(config)
    steps = options.get("steps") if isinstance(options.get("steps"), int) else None
    faults = typed_faults(faults)
    expanded = _expand(faults, config, steps)
    if deadline_s is None:
        deadline_s = _DEADLINE_FLOOR_S + config.startup_s + _SECONDS_A_STEP * (steps or 100)
    elif not deadline_s > 0:
        raise BadInput("deadline_s", deadline_s, "use a number of seconds above 0, or math.inf")
    if max_lost_steps is None:
        max_lost_steps = len(expanded) if spec.sharded else 0
    elif not max_lost_steps >= 0:
        raise BadInput("max_lost_steps", max_lost_steps, "use a number of steps, 0 or more")
    if reference != "off":
        config = msgspec.structs.replace(config, tell_state_at=REFERENCE_STEPS)
    return Experiment(
        name or spec.name,
        job,
        config,
        expanded,
        steps,
        deadline_s,
        max_lost_steps,
        reference,
        faults,
    )


def _resolve(job: str, options: dict[str, Any], *, of_plan: dict[str, Any]) -> JobSpec:
    """Return the job with its options; an option that is refused has the name under which the plan gave it."""
    try:
        return resolve_job(job, options)
    except BadInput as error:
        name = error.field.removeprefix("options.")
        if name == error.field or of_plan.get(name) is None:
            raise
        raise BadInput(name, error.value, error.remedy) from None


def require_settings(names: Iterable[str], beside: Iterable[str] = ()) -> None:
    """Raise BadInput if one of the names is no field of :class:`chaoskit.RunConfig`.

    Args:
        beside: names of arguments that the caller takes beside settings: one of them may have been meant.
    """
    known = set(RunConfig.__struct_fields__) - {"job"}
    for name in sorted(set(names) - known):
        remedy = name_remedy(name, sorted({*known, *beside}))
        raise BadInput("setting", name, f"there is no such setting; {remedy}")


def require_divisible(config: RunConfig) -> None:
    """Refuse a batch that cannot be cut into the shards of a run, where the source of the job states it.

    Raises:
        BadInput: in the words of the rank that would find it.
    """
    for batch in stated_batches(config.job):
        if batch < 1 or batch % config.named_shards:
            raise BadInput(
                "batch_size",
                batch,
                f"use a multiple of the number of shards, {config.named_shards}",
            )


def _require_empty(config: RunConfig) -> None:
    """Refuse to mix the snapshots of two runs. Raises BadInput."""
    from chaoskit.daemon.archive import newest_generation  # imports torch

    assert config.disk is not None
    try:
        found = newest_generation(config)
    except ChaoskitError as error:
        target = config.remote.target if config.remote is not None else config.disk.target
        raise BadInput("remote", target, str(error)) from error
    if found:
        raise BadInput(
            "disk",
            config.disk.target,
            "choose places without snapshots, or resume=True to go on from them",
        )


def _expand(faults: Sequence[Fault], config: RunConfig, steps: int | None) -> tuple[Fault, ...]:
    """Check the faults, and draw the ranks of those that name a role from the run's seed and the fault's place."""
    for fault in faults:
        fault.validate(nodes=config.nodes, steps=steps)
        fault.require(config)
    if (
        faults and not config.resume and all(fault.during is not None for fault in faults)
    ):  # to resume is a recovery
        raise BadInput(
            "during",
            faults[0].during,
            "plan a fault that causes a recovery, too, at a step or a time",
        )
    return draw_ranks(faults, config.nodes, config.seed)
