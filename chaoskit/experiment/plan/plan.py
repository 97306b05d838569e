"""Plan of an experiment with a job, checked in full before a process is started.

-> config.py: the settings and their checks. faults/base.py (validate, require): which runs can have
a fault. experiment/judge/judge.py: the checks with ``deadline_s`` and ``max_lost_steps``.
experiment/plan/planfile.py: plans as files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from chaoskit.config import CheckpointTier, RunConfig, typed_config, validate
from chaoskit.errors import BadInput, ChaoskitError, name_remedy
from chaoskit.faults.base import Fault, draw_ranks, fault_id, typed_faults
from chaoskit.job import JobSpec, resolve_job, stated_batches
from chaoskit.rules import load_rules
from chaoskit.typed import LimitS, typed_arguments
from chaoskit.wire.messages import Trigger

#: Mode of the comparison of a run with plain PyTorch.
ReferenceMode = Literal["off", "on", "required"]
#: Number of steps that are compared with plain PyTorch. Later mistakes are found by the twin, or
#: belong to a recovery.
REFERENCE_STEPS = 8

_SECONDS_A_STEP = 2.0  # generous, because a deadline is for runs that never end
#: Arguments of ``chaos.run`` that are not settings of the run.
_ARGUMENTS = (
    *("check", "command", "deadline_s", "faults", "job", "max_lost_steps", "name"),
    *("options", "reference", "steps", "twin", "until", "watch"),
)
_DEADLINE_FLOOR_S = 60.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run of a job with its faults.

    Attributes:
        name: the name that reports show.
        job: the job as the user named it.
        config: the settings of the run.
        faults: the faults, each for one rank: roles that stand for several ranks are drawn already.
        steps: the number of steps, if the job's options give it; the least number for an open-ended
            job.
        deadline_s: the time limit in seconds. A run that takes longer is ended and has failed;
            ``math.inf`` for no limit.
        max_lost_steps: committed steps that the faults may cost. A run that computed more of them
            again has failed.
        reference: the comparison of the first steps with plain PyTorch: ``off``, ``on`` (where
            PyTorch can run the job) or ``required`` (a run without it is unknown).
        asked: the faults before roles were drawn; empty if they are not recorded.
    """

    name: str
    job: str
    config: RunConfig
    faults: tuple[Fault, ...]
    steps: int | None
    deadline_s: float
    max_lost_steps: int = 0
    reference: ReferenceMode = "off"
    asked: tuple[Fault, ...] = ()

    def triggers(self) -> tuple[Trigger, ...]:
        """Return the hooks where ranks stop for faults, as far as they are known before the run."""
        triggers = (fault.trigger(fault_id(number)) for number, fault in enumerate(self.faults))
        return tuple(trigger for trigger in triggers if trigger is not None)

    @property
    def is_open_ended(self) -> bool:
        """True if the job goes on after its steps until it reaches a goal."""
        return "until" in self.config.job.options

    def unbroken(
        self, schedule: tuple[tuple[int, int], ...] = (), steps: int | None = None
    ) -> Experiment:
        """Return the twin: same job and seed, without faults, spares, rules and disturbing limits.

        It stores no snapshots, and does not begin with one. An open-ended job gets a number of
        steps in place of its goal. A job whose batch follows the world runs on one node.

        Args:
            schedule: (step, number of shards) for each change in a run in which the batch followed
                the world; see :class:`chaoskit.config.BatchScaling`. Empty for the plan's own size.
            steps: the number of steps that an open-ended job took; None for those of the plan.
        """
        config = msgspec.structs.replace(
            self.config, spares=0, disk=None, remote=None, resume=False, rules=()
        )
        config = config.undisturbed()
        if config.follow is not None:
            named_shards = config.named_shards
            follow = msgspec.structs.replace(
                config.follow, schedule=schedule or ((0, named_shards),), named_shards=named_shards
            )
            one_node = {"nodes": 1, "min_world": 1, "elastic": None, "shards": config.shard_count}
            config = msgspec.structs.replace(config, follow=follow, **one_node)
        if self.is_open_ended:
            options = {
                name: option for name, option in config.job.options.items() if name != "until"
            } | {"steps": steps or self.steps}
            config = msgspec.structs.replace(
                config, job=msgspec.structs.replace(config.job, options=options)
            )
        return Experiment(
            f"{self.name} (twin)", self.job, config, (), steps or self.steps, self.deadline_s
        )


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
    reference: ReferenceMode = "off",
    **settings: Any,
) -> Experiment:
    """Check and assemble an experiment with a job, and return it; nothing is started.

    Args:
        job: the name of a reference job (``gpt``), file, or ``file.py:function``.
        name: the name that reports show. Default: the name of the job.
        steps: passed to the job as its option ``steps``.
        until: passed to the job as its option ``until``: the job goes on after ``steps`` steps
            until it reaches this goal; see :mod:`chaoskit.fixtures.jobs.goal`. It requires
            ``steps``. The unbroken run has no such option and takes as many steps.
        options: further options of the job's train function.
        faults: the faults that strike the run.
        deadline_s: time limit in seconds; ``math.inf`` for none. Default: a minute, the start-up
            time and two seconds a step.
        max_lost_steps: committed steps that may be computed again; with 0 a fault may cost the step
            in flight only. Default: 0; for a sharded job one step for each fault, because the job
            goes back to the last step that all ranks have copied.
        reference: compare the first steps with those of plain PyTorch in one process: ``off``,
            ``on`` (where PyTorch can run the job), or ``required`` (a run without a reference is
            *unknown*).
        settings: fields of :class:`chaoskit.config.RunConfig`, such as ``nodes``, ``spares``,
            ``seed``; ``rules`` may be a file.

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
            raise BadInput("until", until, "give steps, too: the least number of steps of the job")
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
        _require_empty(config, config.disk)
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
    """Return the job with its options.

    Args:
        job: the job as the user named it.
        options: the options of its train function.
        of_plan: options that are arguments of the plan, by name.

    Raises:
        BadInput: if the job or an option is refused. An argument of the plan is named as such.
    """
    try:
        return resolve_job(job, options)
    except BadInput as error:
        name = error.field.removeprefix("options.")
        if name == error.field or of_plan.get(name) is None:
            raise
        raise BadInput(name, error.value, error.remedy) from None


def require_settings(names: Iterable[str], beside: Iterable[str] = ()) -> None:
    """Raise BadInput if one of the names is not a field of :class:`chaoskit.RunConfig`.

    Args:
        names: the names to check.
        beside: names of other arguments that the caller accepts; the remedy may suggest one of
            them.
    """
    settings = set(RunConfig.__struct_fields__) - {"job"}
    for name in sorted(set(names) - settings):
        remedy = name_remedy(name, sorted({*settings, *beside}))
        raise BadInput("setting", name, f"there is no such setting; {remedy}")


def require_divisible(config: RunConfig) -> None:
    """Refuse a batch that cannot be cut into the shards of a run, if the job's source states it.

    Raises:
        BadInput: with the same message as the rank that would find it.
    """
    for batch in stated_batches(config.job):
        if batch < 1 or batch % config.named_shards:
            raise BadInput(
                "batch_size",
                batch,
                f"use a multiple of the number of shards, {config.named_shards}",
            )


def _require_empty(config: RunConfig, disk: CheckpointTier) -> None:
    """Raise BadInput if the checkpoint targets hold snapshots, which must not mix with new ones.

    It is raised, too, if they cannot be read.
    """
    from chaoskit.checkpoint.newest import newest_generation  # imports torch

    try:
        newest_snapshot_generation = newest_generation(config)
    except ChaoskitError as error:
        target = config.remote.target if config.remote is not None else disk.target
        raise BadInput("remote", target, str(error)) from error
    if newest_snapshot_generation:
        raise BadInput(
            "disk",
            disk.target,
            "choose places without snapshots, or resume=True to go on from them",
        )


def _expand(faults: Sequence[Fault], config: RunConfig, steps: int | None) -> tuple[Fault, ...]:
    """Check the faults, and return them with a drawn rank in place of each role.

    A rank is drawn from the run's seed and the position of the fault, so that a plan can be
    repeated.

    Raises:
        BadInput: if the run cannot have one of the faults.
    """
    for fault in faults:
        fault.validate(nodes=config.nodes, steps=steps)
        fault.require(config)
    # resuming counts as a recovery
    if faults and not config.resume and all(fault.during is not None for fault in faults):
        raise BadInput(
            "during",
            faults[0].during,
            "plan a fault that causes a recovery, too, at a step or a time",
        )
    return draw_ranks(faults, config.nodes, config.seed)
