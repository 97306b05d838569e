"""The configuration of a run, validated before anything is started.

-> ``cli/training/launch.py``: the options of the command line. ``coordinator/detectors/``: where
the limits decide that a rank hangs or is slow. ``coordinator/membership/``: losses, spares and
sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from chaoskit.elastic.settings import ElasticPolicy, validate_policy
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec, validate_job
from chaoskit.logrule import LogRule
from chaoskit.nodename import require_node_name
from chaoskit.process.host_checks import require_cuda, require_writable
from chaoskit.typed import convert

Detection = Literal["production", "relaxed"]
Reduction = Literal["exact", "fast"]
NonFinitePolicy = Literal["skip", "stop", "retry"]
Copies = Literal["affordable", "every_step"]

#: Detection limits by name, as fields of :class:`RunConfig`. ``production`` changes nothing.
#: ``relaxed`` is for machines that are shared with other work, such as a test run in several
#: processes: a node or a rank that waits seconds for a CPU is not lost.
DETECTION: dict[Detection, dict[str, Any]] = {
    "production": {},
    "relaxed": {"heartbeat_ms": 250, "lease_beats": 4, "hang_floor_ms": 2000, "startup_s": 240.0},
}

_UNDISTURBED_S = 120.0
#: Each node is several processes of this machine or of a cluster; a larger number is a typing
#: error.
NODES_MAX = 1024

#: A rank is never replaced for a smaller factor: measurements vary by some tenths, and a node may
#: be busy.
SLOW_LIMIT_MIN = 2.0


class CheckpointTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place in which a job stores its state while it trains, the interval, and the retention.

    Args:
        target: a directory that all nodes share; for the remote tier, a URL such as
            ``s3://bucket/run``.
        endpoint: the URL of an S3 store that is not Amazon's, such as ``http://minio:9000``; only
            for the remote tier.
        every_steps: the state is stored after each step that is a multiple of this; 0 for never by
            steps. The remote tier stores it after this many steps.
        every_s: the state is stored after this many seconds, too; 0 for never by time.
        keep_last, keep_every, budget_bytes: see
            :class:`chaoskit.checkpoint.disk.retention.Retention`.
    """

    target: str
    endpoint: str = ""
    every_steps: int = 100
    every_s: float = 0.0
    keep_last: int = 2
    keep_every: int = 0
    budget_bytes: int = 0

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of fsspec's file system for the target."""
        return {"endpoint_url": self.endpoint} if self.endpoint else {}


class BatchScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a global batch that follows the world: every rank keeps its number of shards.

    Args:
        rule: how the optimizer's hyperparameters are scaled: ``linear`` (SGD), ``square-root``
            (Adam, AdamW) or ``none``; see :mod:`chaoskit.elastic.scaling`. The script chooses them
            for its own batch, the one of the ``nodes`` with which it starts.
        warmup_steps: a higher learning rate is reached in this many steps.
        schedule: (step, shards) pairs: from that step on the batch has that many shards, all
            computed by one rank. Set only for the reference run of a run in which the world
            changed.
        named_shards: number of shards of the script's own batch. Set only for such a twin.
    """

    rule: Literal["linear", "square-root", "none"]
    warmup_steps: int = 0
    schedule: tuple[tuple[int, int], ...] = ()
    named_shards: int = 0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a run on which coordinator, agents and workers must agree.

    Args:
        job: the job to train.
        nodes: number of failure domains with one worker each; this is the full world.
        spares: number of warm workers that are kept in addition, over all nodes.
        min_world: smallest world that trains; below it the run waits for spares.
        shards: number of fixed slices of the global batch (V); at least ``nodes``, or the largest
            size that ``elastic`` allows. 0 stands for that least number.
        seed: seed of weights, data order and all randomness in the job.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        reduction: ``exact`` (same bits at every world size) or ``fast`` (plain all-reduce).
        buckets: number of pieces of the gradient that are reduced while the backward pass still
            runs; 1 reduces the whole gradient after it.
        nonfinite: how a batch is handled if its gradients are not finite on any rank. The loss does
            not matter: it may be NaN.
        hash_every: steps between checks that every rank received the same reduced gradient, losses
            and votes; 0 for never.
        state_hash_steps: number of steps in which every byte of weights and optimizer state is
            compared over the ranks once, a slice in each step; 0 for never.
        audit_every: steps between two audits, in which a second rank computes a shard and the bits
            are compared; 0 for never.
        max_failures: number of workers that may be lost before the run is given up. Once ranks have
            trained, workers that are given up on suspicion, as hung or slow, do not count, nor do
            workers that were never ready.
        strikes_max: losses of workers within a minute after which a node gets no more workers; 0
            for never.
        heartbeat_ms: interval within which agents report; they do so every 0.8 of it.
        lease_beats: missed reports after which a node is lost. A node that is only slow, as its
            kernel acknowledges what it is sent, has at least a second.
        hang_steps: a phase is suspected of hanging only when it exceeds the duration of this many
            recent steps.
        hang_floor_ms: a phase is suspected of hanging only when it exceeds the longest phase of its
            kind by this, or by the duration of a recovery if that is longer.
        outside_limit_s: limit for the user's own code between two transactions, and for any phase
            while all ranks stand still. The only rank of a job has ``collective_timeout_s``, which
            is longer.
        long_limit_s: limit for a ``trainer.long_phase`` and for a compilation; 0 for no limit.
        balance: give slow ranks fewer shards. This needs more shards than ranks.
        slow_limit: a rank is replaced if the computation of its shards takes this many times as
            long as that of the others, and a spare is ready on another node; 0 for never. The world
            must have three ranks or more.
        slow_steps: number of steps on end for which a rank must be that slow, or of heartbeats if
            steps are shorter than these.
        coordinator_outage_s: agents keep their workers training for this long without a
            coordinator.
        startup_s: limit for starting processes, importing, building the model and restoring a
            state. It also applies to the first steps, while no duration of their phases is known.
        collective_timeout_s: the timeout of gloo and NCCL, as a last resort. It must be longer than
            ``outside_limit_s``: the waiting ranks must not give up before the rank that holds them
            up is found.
        transport: how state moves from a peer: ``auto`` uses shared memory on the same host, else
            TCP.
        memory_copies: number of nodes that copy committed states into their agents' memory; with 0,
            memory has no copies besides the states that ended workers leave behind.
        copies: the states of a replicated job that are copied: ``affordable`` copies as many as
            take 1 % of the training time, with at most 30 s of work between two copies;
            ``every_step`` copies all.
        entries_max: a process of a sharded job is replaced if it was entered this often in a row
            and committed nothing. Entries that another rank found broken earlier count half.
        replacement_s: a sharded job waits this long for a replacement before it goes on with fewer
            ranks, which changes the last bits of sums. A launch without a live node tries to start
            nodes again for this long.
        node_replacements: number of lost nodes that are replaced in a run: a new node starts under
            the name of each as soon as nothing of it lives. With 0, a lost node stays lost unless a
            fault brings one, or no node lives.
        rack_nodes: number of nodes that stand in one rack and may be lost together: ``node0`` to
            ``node{rack_nodes - 1}`` in the first one, and so on. Copies are kept in as many racks
            as there are. With 0, each node stands alone.
        fork: start workers from a warm zygote; ``False`` starts fresh interpreters.
        disk: the tier that stores the state for the case that every node is lost; None stores
            nothing.
        health: the action when a node finds itself unfit to train: ``enforce`` gives it no workers,
            ``report`` only records it, ``off`` does not check.
        quarantined: nodes that are given no workers, whatever they find.
        on_probation: nodes that are given no workers until they have found themselves fit.
        elastic: the sizes between which the world may move on request; with None, the world is of
            ``nodes``, as far as they are there.
        follow: let the global batch follow the number of ranks; with None, the batch and the
            optimizer's hyperparameters stay.
        remote: the tier to which snapshots of the disk tier are uploaded; None uploads nothing.
        resume: continue from the newest snapshot of these tiers, if there is one.
        tell_state_at: number of steps after which the ranks record a sketch of their state, as they
            do at the end; 0 for the end only.
        rules: the lines that the logs of the ranks must show, and the actions if they do not; see
            :mod:`chaoskit.rules`.
    """

    job: JobSpec
    nodes: int = 4
    spares: int = 1
    min_world: int = 1
    shards: int = 0
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    reduction: Reduction = "exact"
    buckets: int = 1
    nonfinite: NonFinitePolicy = "skip"
    hash_every: int = 1
    state_hash_steps: int = 16
    audit_every: int = 0
    max_failures: int = 32
    strikes_max: int = 8
    heartbeat_ms: int = 50
    lease_beats: int = 3
    hang_steps: float = 3.0
    hang_floor_ms: int = 500
    outside_limit_s: float = 120.0
    long_limit_s: float = 0.0
    balance: bool = True
    slow_limit: float = 0.0
    slow_steps: int = 20
    coordinator_outage_s: float = 60.0
    startup_s: float = 120.0
    collective_timeout_s: float = 180.0
    transport: Literal["auto", "tcp"] = "auto"
    memory_copies: int = 1
    copies: Copies = "affordable"
    entries_max: int = 8
    replacement_s: float = 30.0
    node_replacements: int = 0
    rack_nodes: int = 0
    fork: bool = True
    health: Literal["enforce", "report", "off"] = "enforce"
    quarantined: tuple[str, ...] = ()
    on_probation: tuple[str, ...] = ()
    elastic: ElasticPolicy | None = None
    follow: BatchScaling | None = None
    disk: CheckpointTier | None = None
    remote: CheckpointTier | None = None
    resume: bool = False
    tell_state_at: int = 0
    rules: tuple[LogRule, ...] = ()

    def undisturbed(self) -> RunConfig:
        """Return the same run with limits of minutes: only a process that ends counts as a failure.

        No number of a run depends on a limit, so a reference run may take as long as a busy machine
        makes it.
        """
        return msgspec.structs.replace(
            self,
            lease_beats=max(self.lease_beats, math.ceil(_UNDISTURBED_S * 1000 / self.heartbeat_ms)),
            hang_floor_ms=max(self.hang_floor_ms, int(_UNDISTURBED_S * 1000)),
            slow_limit=0.0,
            startup_s=max(self.startup_s, 2 * _UNDISTURBED_S),
        )

    @property
    def shard_count(self) -> int:
        """The number of shards (V)."""
        return self.shards or self.nodes_max

    def shards_of(self, step: int, world: int) -> int:
        """Return the number of shards in the global batch of ``step`` for ``world`` ranks.

        It is constant unless the batch follows the world.
        """
        if self.follow is None:
            return self.shard_count
        scheduled = [shards for begin, shards in self.follow.schedule if begin <= step]
        return scheduled[-1] if scheduled else self.shard_count // self.nodes_max * world

    @property
    def world_max(self) -> int:
        """The largest world, ranks that are about to leave included."""
        return self.shard_count if self.follow is None else self.nodes_max

    @property
    def named_shards(self) -> int:
        """The number of shards of the script's own batch, the one of ``nodes`` ranks."""
        return (self.follow and self.follow.named_shards) or self.shards_of(-1, self.nodes)

    @property
    def least_world(self) -> int:
        """The smallest world that trains."""
        return self.elastic.min_replicas if self.elastic is not None else self.min_world

    @property
    def nodes_max(self) -> int:
        """The largest number of nodes that the world may ever have."""
        return self.elastic.max_replicas if self.elastic is not None else self.nodes

    def rack(self, node: str) -> str:
        """Return the label of a node's rack: it is equal for nodes that may be lost together.

        A node without a number, or of a run without racks, has its own name as its label.
        """
        stem = node.rstrip("0123456789")
        number = node.removeprefix(stem)
        return f"{stem}rack{int(number) // self.rack_nodes}" if self.rack_nodes and number else node


def disk_directory(run_directory: str | Path, node: str) -> Path:
    """Return the directory into which the job on ``node`` writes: each node has its own."""
    return Path(run_directory) / "disk" / node


#: The least value of each numeric setting.
_LEAST: dict[str, float] = {
    "nodes": 1,
    "spares": 0,
    "min_world": 1,
    "shards": 0,
    "seed": 0,
    "buckets": 1,
    "hash_every": 0,
    "state_hash_steps": 0,
    "audit_every": 0,
    "max_failures": 0,
    "strikes_max": 0,
    "slow_limit": 0,
    "slow_steps": 10,
    "coordinator_outage_s": 0,
    "heartbeat_ms": 1,
    "lease_beats": 2,
    "hang_steps": 1,
    "hang_floor_ms": 1,
    "outside_limit_s": 0.001,
    "long_limit_s": 0,
    "startup_s": 0.001,
    "collective_timeout_s": 0.001,
    "memory_copies": 0,
    "entries_max": 1,
    "replacement_s": 0,
    "node_replacements": 0,
    "rack_nodes": 0,
}


def typed_config(job: JobSpec, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run from settings as a user gives them.

    It is not validated yet.

    Raises:
        BadInput: naming the setting, or the part of one such as ``disk.keep_last``, that is not of
            its declared type.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(RunConfig)}
    return RunConfig(
        job=job, **{name: convert(name, setting, types[name]) for name, setting in settings.items()}
    )


def validate(config: RunConfig) -> None:
    """Raise BadInput for a configuration that cannot work.

    The source of the job is read, and the directory of the disk tier is tried out. Nothing is
    created or run.

    Raises:
        BadInput: naming the field, its value and the remedy.
    """
    for field in RunConfig.__struct_fields__:
        setting = getattr(config, field)
        if isinstance(setting, float) and not math.isfinite(setting):
            raise BadInput(field, setting, "use a finite number")
    for field, least in _LEAST.items():
        if getattr(config, field) < least:
            raise BadInput(field, getattr(config, field), f"use {least:g} or more")
    if config.seed >= 2**63:
        raise BadInput("seed", config.seed, "use less than 2**63")
    if config.nodes_max + config.spares > NODES_MAX:
        field = "nodes" if config.nodes_max > NODES_MAX else "spares"
        raise BadInput(
            field, getattr(config, field), f"use at most {NODES_MAX} nodes and spares together"
        )
    _validate_time_limits(config)
    if config.min_world > config.nodes:
        raise BadInput("min_world", config.min_world, f"use at most nodes={config.nodes}")
    for field in ("quarantined", "on_probation"):
        for name in getattr(config, field):
            require_node_name(field, name)
    if config.on_probation and config.health != "enforce":
        raise BadInput(
            "health", config.health, "use enforce: nodes on probation must pass its checks"
        )
    if config.elastic is not None:
        _validate_elastic(config.elastic, config)
    if config.shards and config.shards < config.nodes_max:
        field = "nodes" if config.elastic is None else "maxReplicas"
        raise BadInput(
            "shards",
            config.shards,
            f"use at least {field}={config.nodes_max}: every rank needs a shard",
        )
    if config.follow is not None:
        _validate_follow(config.follow, config)
    if 0 < config.slow_limit < SLOW_LIMIT_MIN:
        raise BadInput(
            "slow_limit",
            config.slow_limit,
            f"use {SLOW_LIMIT_MIN:g} or more: below it shards are moved",
        )
    if config.device == "cuda":
        require_cuda(config.nodes)
    for field in ("disk", "remote"):
        _validate_tier(field, getattr(config, field))
    if config.remote is not None and config.disk is None:
        remedy = "give a disk tier, too (--checkpoints, disk=): uploads are made from there"
        raise BadInput("remote", config.remote.target, remedy)
    if config.disk is not None and config.device == "cuda" and not config.job.sharded:
        remedy = "leave it out, and use chaoskit.checkpoint.SnapshotWriter: no agent sees a replica on a device"
        raise BadInput("disk", config.disk.target, remedy)
    validate_job(config.job)


def _validate_time_limits(config: RunConfig) -> None:
    """Raise BadInput if the least informed part would notice a failure first by these limits."""
    lease_s = config.heartbeat_ms * config.lease_beats / 1000
    lease = f"heartbeat_ms={config.heartbeat_ms} x lease_beats={config.lease_beats}, {lease_s:g} s"
    collective_s = config.collective_timeout_s
    if collective_s <= lease_s:
        remedy = f"use more than {lease}: else collectives give up before a lost node is noticed"
        raise BadInput("collective_timeout_s", collective_s, remedy)
    if collective_s <= config.hang_floor_ms / 1000:
        remedy = f"use more than hang_floor_ms={config.hang_floor_ms}: else collectives give up before a hang is found"
        raise BadInput("collective_timeout_s", collective_s, remedy)
    if collective_s < config.outside_limit_s:
        remedy = f"use at least outside_limit_s={config.outside_limit_s:g}: else collectives give up while a rank may"
        raise BadInput(
            "collective_timeout_s", collective_s, f"{remedy} still be between two transactions"
        )
    if config.coordinator_outage_s <= lease_s:
        remedy = f"use more than {lease}: else agents give up on a coordinator that is away for less than a lease"
        raise BadInput("coordinator_outage_s", config.coordinator_outage_s, remedy)


def _validate_elastic(policy: ElasticPolicy, config: RunConfig) -> None:
    """Raise BadInput if the elastic policy is invalid, or the sizes of the run contradict it."""
    validate_policy(policy)
    if config.min_world > policy.min_replicas:
        raise BadInput(
            "min_world", config.min_world, "leave it out: minReplicas of the elastic policy sets it"
        )
    if config.nodes not in policy.sizes:
        raise BadInput(
            "nodes",
            config.nodes,
            f"start with a size that the elastic policy allows: {policy.sizes_in_words}",
        )


def _validate_follow(follow: BatchScaling, config: RunConfig) -> None:
    """Raise BadInput if the global batch of the run cannot follow the world."""
    if follow.warmup_steps < 0:
        raise BadInput("follow.warmup_steps", follow.warmup_steps, "use 0 or more")
    if follow.schedule and config.nodes_max > 1:
        raise BadInput(
            "follow.schedule", follow.schedule, "leave it out: it makes the twin, which is one rank"
        )
    if config.job.sharded:
        remedy = (
            "leave it out: a sharded job keeps its batch, as the order of its sums depends on it"
        )
        raise BadInput("follow", follow.rule, remedy)
    if config.shards % config.nodes_max:
        remedy = f"use a multiple of {config.nodes_max}, the largest world: each rank has as many if the batch follows"
        raise BadInput("shards", config.shards, remedy)


def _validate_tier(field: str, tier: CheckpointTier | None) -> None:
    """Raise BadInput if a tier cannot be used; None is no tier."""
    if tier is None:
        return
    for name in ("every_steps", "every_s", "keep_last", "keep_every", "budget_bytes"):
        if not 0 <= getattr(tier, name) < math.inf:
            raise BadInput(
                f"{field}.{name}", getattr(tier, name), "use 0 or more, and a finite number"
            )
    if not tier.every_steps and not tier.every_s:
        raise BadInput(
            f"{field}.every_steps", 0, f"use 1 or more, or {field}.every_s: nothing would be stored"
        )
    is_url = "://" in tier.target
    validate_endpoint(f"{field}.endpoint", tier.endpoint, tier.target)
    if field == "remote" and not is_url:
        raise BadInput(
            "remote",
            tier.target,
            "write PROTOCOL://PLACE, such as s3://bucket/run or file:///mnt/run",
        )
    if field == "disk":
        if is_url or not Path(tier.target).is_absolute():
            raise BadInput(
                "disk", tier.target, "name a directory by its absolute path, which all nodes see"
            )
        require_writable("disk", Path(tier.target))


def validate_endpoint(field: str, endpoint: str, target: str) -> None:
    """Raise BadInput if the store of ``target`` cannot have this endpoint; "" is none."""
    if endpoint and not target.startswith(("s3://", "s3a://")):
        raise BadInput(field, endpoint, "leave it out: only stores behind s3://... have one")
    if endpoint and not re.fullmatch(r"https?://[^/?#\s]+/?", endpoint):
        raise BadInput(field, endpoint, "write http://HOST:PORT or https://HOST")
