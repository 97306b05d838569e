"""Timeouts that contradict each other: a table of what must be longer than what, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chaoskit.config import RunConfig
from chaoskit.rules.patterns import nests_repeats
from chaoskit.rules.settings import Setting, Settings, read_settings, settings_of

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """Two settings that do not go together.

    Args:
        id: of the check; stable.
        settings: both, with their values.
        reason: what goes wrong, in a sentence.
        remedy: what to write instead.
    """

    id: str
    severity: Severity
    settings: tuple[str, str]
    reason: str
    remedy: str


@dataclass(frozen=True)
class Order:
    """``shorter`` must be below ``longer``; equal is wrong, too, unless ``equal`` allows it.

    Args:
        tie: what equal values are; "" if they are in order.
    """

    id: str
    shorter: str
    longer: str
    reason: str
    severity: Severity = "error"
    tie: Severity | Literal[""] = ""


#: Sources of the reasons are those of the settings, in the docstring of :mod:`chaoskit.rules.settings`.
ORDERS = [
    Order(
        "CK02",
        "chaoskit.hang_floor_ms",
        "chaoskit.collective_timeout_s",
        "collectives give up before any phase may be called a hang, so that every rank fails and none is named",
        tie="error",
    ),
    Order(
        "CK03",
        "chaoskit.outside_limit_s",
        "chaoskit.collective_timeout_s",
        "the collectives of the other ranks give up while one is still allowed to be between two transactions",
    ),
    Order(
        "TR01",
        "torchrun.last_call_timeout",
        "torchrun.join_timeout",
        "the rendezvous times out while it still waits for late nodes",
        tie="error",
    ),
    Order(
        "TR03",
        "torchrun.monitor_interval",
        "nccl.process_group_timeout",
        "ranks that wait for a dead one give up before the agent has looked at its workers",
        tie="error",
    ),
    Order(
        "K801",
        "torchrun.shutdown_timeout",
        "kubernetes.terminationGracePeriodSeconds",
        "the kubelet kills the agent while it still waits for its workers: what they save at SIGTERM may be cut short",
        tie="warning",
    ),
    Order(
        "K802",
        "nvrx-inprocess.termination_grace_time",
        "kubernetes.terminationGracePeriodSeconds",
        "the kubelet kills the pod before the grace between SIGTERM and SIGKILL is over",
    ),
    Order(
        "TF01",
        "torchft.join_timeout_ms",
        "torchft.TORCHFT_QUORUM_TIMEOUT_SEC",
        "the manager gives up on a quorum while the lighthouse still waits for stragglers",
        tie="warning",
    ),
    Order(
        "TF02",
        "torchft.heartbeat_timeout_ms",
        "torchft.TORCHFT_QUORUM_TIMEOUT_SEC",
        "the manager gives up on a quorum while the lighthouse still counts a dead replica as alive",
        tie="error",
    ),
    Order(
        "TF03",
        "torchft.heartbeat_timeout_ms",
        "torchft.TORCHFT_TIMEOUT_SEC",
        "collectives fail while the dead replica still counts as alive, and the next quorum waits for it",
        severity="warning",
        tie="warning",
    ),
    Order(
        "TF04",
        "torchft.quorum_tick_ms",
        "torchft.heartbeat_timeout_ms",
        "a replica is dead and back between two looks at the quorum",
        tie="error",
    ),
    Order(
        "NV01",
        "nvrx-inprocess.soft_timeout",
        "nvrx-inprocess.hard_timeout",
        "ranks are killed before they are asked to restart; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV02",
        "nvrx-inprocess.hard_timeout",
        "nvrx-inprocess.barrier_timeout",
        "the barrier gives up before the rank that holds it up is killed; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV03",
        "nvrx-inprocess.heartbeat_timeout",
        "nvrx-inprocess.barrier_timeout",
        "the barrier gives up before a missing rank is noticed; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV04",
        "nvrx-inprocess.monitor_process_interval",
        "nvrx-inprocess.heartbeat_timeout",
        "heartbeats come more rarely than they are expected; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV05",
        "nvrx-inprocess.monitor_thread_interval",
        "nvrx-inprocess.soft_timeout",
        "the thread that restarts a rank looks too rarely to do so in time; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV06",
        "nvrx-inprocess.progress_watchdog_interval",
        "nvrx-inprocess.soft_timeout",
        "a healthy rank reports too rarely and is restarted; Wrapper refuses it",
        tie="error",
    ),
    Order(
        "NV07",
        "nvrx-inprocess.soft_timeout",
        "nccl.process_group_timeout",
        "NCCL's watchdog ends the process before the wrapper can restart it in place",
        tie="error",
    ),
    Order(
        "NV08",
        "nvrx.rank_heartbeat_timeout",
        "nvrx.initial_rank_heartbeat_timeout",
        "the first heartbeat, which waits for the start, has less time than any later one",
        severity="warning",
    ),
    Order(
        "NV09",
        "nvrx.workload_check_interval",
        "nvrx.rank_heartbeat_timeout",
        "ranks are looked at more rarely than they may be silent",
        tie="error",
    ),
    Order(
        "NV10",
        "nccl.process_group_timeout",
        "nvrx.rank_heartbeat_timeout",
        "hung ranks are killed before the collective gives up: none is named, and nothing is dumped",
        severity="warning",
    ),
]


def lint(paths: Iterable[Path]) -> list[Finding]:
    """What contradicts what in these files, together: the gravest first.

    Raises:
        BadInput: see :func:`chaoskit.rules.settings.read_settings`.
    """
    return _contradictions(read_settings(paths))


def lint_config(config: RunConfig) -> list[Finding]:
    """The same of a run of our own: its log rules and its settings."""
    return _contradictions(settings_of(config))


def _contradictions(settings: Settings) -> list[Finding]:
    found = [one for order in ORDERS for one in in_order(order, settings)]
    found += [one for check in CHECKS for one in check(settings)]
    return sorted(found, key=lambda one: (one.severity != "error", one.id))


def in_order(order: Order, settings: Settings) -> Iterator[Finding]:
    """A finding if both settings are there, one of them by hand, and the shorter one is not shorter."""
    shorter, longer = settings.get(order.shorter), settings.get(order.longer)
    if shorter is None or longer is None or shorter.value < longer.value or not (shorter.where or longer.where):
        return
    severity = order.severity if shorter.value > longer.value else order.tie
    if severity:
        remedy = f"set {longer.known.name} above {_in_unit(shorter, longer)}, or {shorter.known.name} below"
        remedy += f" {_in_unit(longer, shorter)}"
        yield Finding(order.id, severity, (str(shorter), str(longer)), order.reason, remedy)


def _in_unit(value: Setting, of: Setting) -> str:
    """A value in the unit in which another setting is written."""
    return f"{value.value / of.known.unit_s:g}"


# -- checks of more than two values -------------------------------------------------------------------------------


def lease(settings: Settings) -> Iterator[Finding]:
    """A node that is lost must be noticed before anything waits for it in vain."""
    beat, beats = settings.get("chaoskit.heartbeat_ms"), settings.get("chaoskit.lease_beats")
    if beat is None or beats is None:
        return
    lease_s = beat.value * beats.value
    said = f"{beat} x {beats} = {lease_s:g} s"
    for id_, name, reason in (
        ("CK01", "collective_timeout_s", "collectives give up before the loss of a node is noticed"),
        ("CK04", "coordinator_outage_s", "agents give up on a coordinator that is away for less than a lease"),
    ):
        other = settings.get(f"chaoskit.{name}")
        if other is not None and lease_s >= other.value:
            remedy = f"set {name} above {lease_s:g}, or report more often"
            yield Finding(id_, "error", (said, str(other)), reason, remedy)


def keep_alive(settings: Settings) -> Iterator[Finding]:
    """torchrun counts a node as dead after ``keep_alive_interval`` x ``keep_alive_max_attempt``."""
    interval, attempts = settings.get("torchrun.keep_alive_interval"), settings.get("torchrun.keep_alive_max_attempt")
    if interval is None or attempts is None:
        return
    dead_s = interval.value * attempts.value
    said = f"{interval} x {attempts} = {dead_s:g} s"
    beat, group = settings.get("torchrun.heartbeat_timeout"), settings.get("nccl.process_group_timeout")
    if beat is not None and beat.value >= dead_s:
        reason = "one keep-alive that is slow, but within its limit, makes a healthy node count as dead"
        remedy = f"set keep_alive_interval x keep_alive_max_attempt above {beat.value:g}"
        yield Finding("TR02", "error", (str(beat), said), reason, remedy)
    if group is not None and group.value <= dead_s:
        reason = "collectives give up while the rendezvous still counts the dead node, and waits for it"
        remedy = f"set process_group_timeout above {dead_s:g}, or keep_alive_interval lower"
        yield Finding("TR04", "warning", (str(group), said), reason, remedy)


def nccl_watchdog(settings: Settings) -> Iterator[Finding]:
    """Timeouts of NCCL that are set and do nothing."""
    handling, group = settings.get("nccl.TORCH_NCCL_ASYNC_ERROR_HANDLING"), settings.get("nccl.process_group_timeout")
    blocking = settings.get("nccl.TORCH_NCCL_BLOCKING_WAIT")
    if handling is not None and group is not None and handling.value == 0 and blocking and blocking.value == 0:
        reason = "a collective that times out is noticed and nothing is done: the job hangs on"
        yield Finding(
            "NC01", "error", (str(handling), str(group)), reason, "leave it out: the default 3 ends the process"
        )
    monitoring, beat = (
        settings.get("nccl.TORCH_NCCL_ENABLE_MONITORING"),
        settings.get("nccl.TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    )
    if monitoring is not None and beat is not None and monitoring.value == 0 and beat.where:
        reason = "the heartbeat of the watchdog has a limit, and nothing looks at it"
        yield Finding("NC02", "error", (str(monitoring), str(beat)), reason, "set TORCH_NCCL_ENABLE_MONITORING=1")


def log_rules(settings: Settings) -> Iterator[Finding]:
    """A log rule knows least: it must leave time to whatever knows more."""
    knows_more = (
        ("nccl.process_group_timeout", "the collective gives up, names the ranks and dumps what it recorded"),
        ("chaoskit.outside_limit_s", "a rank is called hung that may still be outside of a transaction"),
        ("torchft.TORCHFT_TIMEOUT_SEC", "torchft gives up on the step and goes on without the replica"),
        ("nvrx-inprocess.hard_timeout", "the wrapper restarts the function in place"),
    )
    for rule, _ in settings.rules:
        if rule.action == "alert":
            continue
        for key, event in knows_more:
            other = settings.get(key)
            if rule.frequency_s is not None and other is not None and rule.frequency_s <= other.value:
                mine = f"{rule.name}: expectedRecurringFrequencyInSeconds={rule.frequency_s:g}"
                reason = f"the rule acts before {event}"
                remedy = f"expect a match within more than {other.value:g} s, or set {other.known.name} lower"
                yield Finding("LR01", "warning", (mine, str(other)), reason, remedy)
        start = settings.get("torchrun.join_timeout")  # chaoskit's own clock begins when a worker takes a rank
        if rule.start_cutoff_s is not None and start is not None and rule.start_cutoff_s <= start.value:
            mine = f"{rule.name}: expectedStartCutOffInSeconds={rule.start_cutoff_s:g}"
            reason = "the job is called hanging while it may still start"
            remedy = f"allow more than {start.value:g} s, or set {start.known.name} lower"
            yield Finding("LR02", "warning", (mine, str(start)), reason, remedy)
        if rule.start_cutoff_s is None and rule.frequency_s is not None:
            mine = f"{rule.name}: expectedRecurringFrequencyInSeconds={rule.frequency_s:g}"
            reason = "a job that hangs before its first match is never noticed: the frequency counts from a match"
            remedy = "give expectedStartCutOffInSeconds, too"
            yield Finding("LR03", "warning", (mine, "expectedStartCutOffInSeconds not set"), reason, remedy)


def patterns(settings: Settings) -> Iterator[Finding]:
    """A pattern that backtracks without end is switched off in the middle of a run."""
    for rule, _ in settings.rules:
        for name, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
            if nests_repeats(pattern):
                reason = "a line that does not match takes a time that doubles with every character"
                remedy = "repeat once, as a+ for (a+)+; see which line is too slow by chaoskit rules test"
                said = (f"{rule.name}: {name}={pattern}", "a repeat within a repeat")
                yield Finding("LR04", "warning", said, reason, remedy)


CHECKS: list[Callable[[Settings], Iterator[Finding]]] = [lease, keep_alive, nccl_watchdog, log_rules, patterns]
