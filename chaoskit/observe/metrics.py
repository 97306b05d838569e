"""Prometheus metrics of a run. They are computed on each scrape and not before.

-> observe/follower.py: the values. observe/histograms.py: the buckets.
-> observe/watching.py starts the server of a launch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from chaoskit.errors import BadInput
from chaoskit.observe.follower import Follower
from chaoskit.observe.histograms import STEP_BUCKETS_S, Histogram, RecoveryTimes
from chaoskit.observe.live import Live, LiveState
from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import Phase

if TYPE_CHECKING:
    from prometheus_client import Metric

LOOPBACK = "127.0.0.1"
_RANKS_MAX = 64  # beyond this number, ranks are counted by phase and not named
#: The windows of the recent ratios, in seconds.
_WINDOWS = {"10m": 600.0, "1h": 3600.0}


class RunMetrics:
    """A collector for ``prometheus_client``, which polls the run once for each scrape.

    Args:
        live: the live state of the run.
        lock: is held while the follower is used, because other threads use it too.

    Attributes:
        follower: the follower of the run, which the owner sets; None before. It calls
            :meth:`observe_step` and :meth:`observe_setback`.
    """

    def __init__(self, live: Live, lock: threading.RLock) -> None:
        self._live, self._lock = live, lock
        self.follower: Follower | None = None
        self._step_times = Histogram(STEP_BUCKETS_S)
        self._recoveries = RecoveryTimes()
        self._highest: dict[
            str, float
        ] = {}  # counters must not fall, though the time of a step may be classified anew

    def observe_step(self, spent_ns: int) -> None:
        """Count a finished step, skipped or not, and the time in ns that was spent on it."""
        self._step_times.observe(spent_ns)

    def observe_setback(self, setback: Setback) -> None:
        """Count a recovery or a planned resize, after which training goes on."""
        self._recoveries.observe(setback)

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registration does not poll the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read the new records of the run, and yield all metrics; none without a follower."""
        with self._lock:
            follower = self.follower
            if follower is None:
                return
            follower.poll()
            self._recoveries.count_later_phases()
            metrics = [
                *self._training_metrics(follower),
                *self._time_metrics(follower),
                *self._node_metrics(follower),
            ]
        yield from metrics

    def _training_metrics(self, follower: Follower) -> Iterator[Metric]:
        """Yield metrics of the training: steps, loss, world, lost ranks, resizes, recoveries."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        accountant = follower.accountant
        yield CounterMetricFamily("chaoskit_step", "Committed steps.", accountant.step + 1)
        if accountant.loss is not None:
            yield GaugeMetricFamily("chaoskit_loss", "Loss of the newest step.", accountant.loss)
        yield GaugeMetricFamily("chaoskit_world_size", "Ranks that train.", accountant.world)
        yield GaugeMetricFamily(
            "chaoskit_full_world_size", "Ranks of the full world.", accountant.full_world
        )
        yield GaugeMetricFamily(
            "chaoskit_generation", "Number of the membership.", accountant.generation
        )
        yield GaugeMetricFamily(
            "chaoskit_recovering",
            "1 while a recovery is under way.",
            float(_is_recovering(follower)),
        )
        losses = CounterMetricFamily(
            "chaoskit_losses", "Ranks that were given up.", labels=["cause"]
        )
        for cause, count in accountant.losses.items():
            losses.add_metric([cause], count)
        yield losses
        yield CounterMetricFamily(
            "chaoskit_resizes", "Planned changes of the world.", self._recoveries.resizes
        )
        steps = HistogramMetricFamily("chaoskit_step_seconds", "Time of committed steps.")
        steps.add_metric([], self._step_times.buckets(), self._step_times.sum_s)
        yield steps
        total = HistogramMetricFamily(
            "chaoskit_time_to_recover_seconds", "From the fault to the first good step."
        )
        total.add_metric([], self._recoveries.total.buckets(), self._recoveries.total.sum_s)
        yield total
        recovery = HistogramMetricFamily(
            "chaoskit_recovery_seconds", "Recoveries, by phase.", labels=["phase"]
        )
        for phase, histogram in self._recoveries.phases.items():
            recovery.add_metric([phase], histogram.buckets(), histogram.sum_s)
        yield recovery

    def _time_metrics(self, follower: Follower) -> Iterator[Metric]:
        """Yield metrics of the time account."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        account = follower.account()
        yield GaugeMetricFamily(
            "chaoskit_goodput_ratio", "Productive time / wall time.", account.goodput
        )
        ettr = GaugeMetricFamily(
            "chaoskit_ettr_ratio", "Effective training time ratio.", labels=["convention"]
        )
        ettr.add_metric(["wall"], account.ettr_wall)
        ettr.add_metric(["productive"], account.ettr_productive)
        yield ettr
        yield from _recent_ratios(follower)
        yield CounterMetricFamily(
            "chaoskit_wall_seconds", "Time since the start of the run.", account.wall_s
        )
        settled = follower.accountant.account()
        productive_s = self._never_lower("", settled.productive_s)
        yield CounterMetricFamily(
            "chaoskit_productive_seconds", "Time of committed steps that were kept.", productive_s
        )
        lost = CounterMetricFamily(
            "chaoskit_lost_seconds", "Time that was not productive.", labels=["cause"]
        )
        for cause, seconds in settled.lost_s.items():
            lost.add_metric([cause], self._never_lower(cause, seconds))
        yield lost
        unsettled = "Time since the last event, not yet known to be productive or lost."
        yield GaugeMetricFamily(
            "chaoskit_unsettled_seconds", unsettled, account.wall_s - settled.wall_s
        )

    def _never_lower(self, name: str, seconds: float) -> float:
        """Return the larger one of ``seconds`` and the highest earlier value of a counter."""
        self._highest[name] = max(seconds, self._highest.get(name, 0.0))
        return self._highest[name]

    def _node_metrics(self, follower: Follower) -> Iterator[Metric]:
        """Yield metrics of nodes, spares and copies of the state."""
        from prometheus_client.core import GaugeMetricFamily

        now_ns, live = time.monotonic_ns(), self._live.state()
        nodes = GaugeMetricFamily(
            "chaoskit_node_up", "1 if the node sent a heartbeat in the last 2 s.", labels=["node"]
        )
        for node in sorted(follower.nodes | set(live.nodes)):
            nodes.add_metric([node], float(live.is_up(node, now_ns)))
        yield nodes
        ready = follower.accountant.spares_ready
        yield GaugeMetricFamily("chaoskit_spares_ready", "Warm workers without a rank.", ready)
        tiers = GaugeMetricFamily(
            "chaoskit_snapshot_step", "Newest complete copy of the state.", labels=["tier"]
        )
        ages = GaugeMetricFamily(
            "chaoskit_snapshot_age_seconds", "Time since this copy was reported.", labels=["tier"]
        )
        for tier, stored in follower.stored.items():
            tiers.add_metric([tier], stored.step)
            ages.add_metric([tier], (now_ns - stored.t_ns) / 1e9)
        yield tiers
        yield ages
        yield from _phase_metrics(follower, live)


def _recent_ratios(follower: Follower) -> Iterator[Metric]:
    """Yield the ratios of the last minutes, for users without means to compute them."""
    from prometheus_client.core import GaugeMetricFamily

    goodput = GaugeMetricFamily(
        "chaoskit_recent_goodput_ratio", "Goodput of the last minutes.", labels=["window"]
    )
    description = "Effective training time ratio of the last minutes."
    ettr = GaugeMetricFamily(
        "chaoskit_recent_ettr_ratio", description, labels=["window", "convention"]
    )
    for window, window_s in _WINDOWS.items():
        recently = follower.recently(window_s)
        goodput.add_metric([window], recently.goodput)
        ettr.add_metric([window, "wall"], recently.ettr_wall)
        ettr.add_metric([window, "productive"], recently.ettr_productive)
    yield goodput
    yield ettr


def _phase_metrics(follower: Follower, live: LiveState) -> Iterator[Metric]:
    """Yield the number of ranks in each phase and, for small worlds, the phase of each rank."""
    from prometheus_client.core import GaugeMetricFamily

    places = [(place.rank, name) for name, place in follower.workers.items() if name in live.pulses]
    ranks = {rank: Phase(live.pulses[name].phase) for rank, name in places if rank is not None}
    counted = Counter(ranks.values())
    counts = GaugeMetricFamily("chaoskit_ranks", "Ranks by phase.", labels=["phase"])
    for phase in Phase:
        counts.add_metric([phase.label], counted[phase])
    yield counts
    if len(ranks) > _RANKS_MAX:
        return
    current_phase = GaugeMetricFamily(
        "chaoskit_phase", "1 for the phase that the rank is in.", labels=["rank", "phase"]
    )
    for rank, current in sorted(ranks.items()):
        for phase in Phase:
            current_phase.add_metric([str(rank), phase.label], float(phase == current))
    yield current_phase


def _is_recovering(follower: Follower) -> bool:
    """Return True while a recovery is under way; a planned resize is none."""
    setback = follower.accountant.open
    return setback is not None and not setback.planned


class MetricsServer:
    """A server that answers scrapes over HTTP, on a thread of its own, until it is closed.

    Args:
        port: the port; 0 for any.

    Attributes:
        url: its address, with the port that it has.

    Raises:
        BadInput: if ``prometheus_client`` is not installed.
        OSError: if it cannot listen there, as on a port that is taken.
    """

    def __init__(self, metrics: RunMetrics, host: str, port: int) -> None:
        require_client(port)
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def require_client(port: int) -> None:
    """Raise BadInput for ``metrics_port`` if ``prometheus_client`` is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        remedy = "install prometheus_client: pip install 'chaoskit[observe]'"
        raise BadInput("metrics_port", port, remedy) from None
