"""What a run tells Prometheus. Nothing is computed before somebody scrapes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from chaoskit.errors import BadInput
from chaoskit.observe.follow import Follower
from chaoskit.observe.histograms import STEP_BUCKETS_S, Histogram, RecoveryTimes
from chaoskit.observe.live import Live, LiveState
from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import Phase

if TYPE_CHECKING:
    from prometheus_client import Metric

LOOPBACK = "127.0.0.1"
_RANKS_MAX = 64  # with more, ranks are counted by phase, not named
#: Over which the newest ratios are told; see also ``chaoskit top``.
_WINDOWS = {"10m": 600.0, "1h": 3600.0}


class RunMetrics:
    """A collector for ``prometheus_client``: one scrape, one look at the run.

    Args:
        live: what the coordinator says.
        lock: held while the follower is used, as others may use it, too.

    Attributes:
        follower: of the run; it tells :meth:`observe_step` and :meth:`observe_setback` what it sees.
    """

    def __init__(self, live: Live, lock: threading.RLock) -> None:
        self._live, self._lock = live, lock
        self.follower: Follower | None = None
        self._step_times = Histogram(STEP_BUCKETS_S)
        self._recoveries = RecoveryTimes()
        self._highest: dict[str, float] = {}  # a counter never falls, though time may be spent anew

    def observe_step(self, spent_ns: int) -> None:
        """A step was committed."""
        self._step_times.observe(spent_ns)

    def observe_setback(self, setback: Setback) -> None:
        """Training goes on after one, and it is settled."""
        self._recoveries.observe(setback)

    def describe(self) -> Iterable[Metric]:
        """Names are known without a look at the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        with self._lock:
            follower = self.follower
            if follower is None:
                return
            follower.poll()
            self._recoveries.look()
            found = [
                *self._of_training(follower),
                *self._of_time(follower),
                *self._of_places(follower),
            ]
        yield from found

    def _of_training(self, follower: Follower) -> Iterator[Metric]:
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
            "chaoskit_full_world_size", "Ranks that shall train.", accountant.full_world
        )
        yield GaugeMetricFamily(
            "chaoskit_generation", "Number of the membership.", accountant.generation
        )
        yield GaugeMetricFamily(
            "chaoskit_recovering", "1 while training stands still.", float(_stands(follower))
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

    def _of_time(self, follower: Follower) -> Iterator[Metric]:
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
        yield from _of_late(follower)
        yield CounterMetricFamily(
            "chaoskit_wall_seconds", "Time since the start of the run.", account.wall_s
        )
        settled = follower.accountant.account()
        productive_s = self._rising("", settled.productive_s)
        yield CounterMetricFamily(
            "chaoskit_productive_seconds", "Time of steps that live on.", productive_s
        )
        lost = CounterMetricFamily(
            "chaoskit_lost_seconds", "Time that was not productive.", labels=["cause"]
        )
        for cause, seconds in settled.lost_s.items():
            lost.add_metric([cause], self._rising(cause, seconds))
        yield lost
        unsettled = (
            "Time of which is not known yet whether it is productive or lost: since the last event."
        )
        yield GaugeMetricFamily(
            "chaoskit_unsettled_seconds", unsettled, account.wall_s - settled.wall_s
        )

    def _rising(self, name: str, seconds: float) -> float:
        self._highest[name] = max(seconds, self._highest.get(name, 0.0))
        return self._highest[name]

    def _of_places(self, follower: Follower) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        now_ns, live = time.monotonic_ns(), self._live.state()
        nodes = GaugeMetricFamily(
            "chaoskit_node_up", "1 if the node was heard in the last 2 s.", labels=["node"]
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
            "chaoskit_snapshot_age_seconds", "How long ago it was told of.", labels=["tier"]
        )
        for tier, stored in follower.stored.items():
            tiers.add_metric([tier], stored.step)
            ages.add_metric([tier], (now_ns - stored.t_ns) / 1e9)
        yield tiers
        yield ages
        yield from _of_phases(follower, live)


def _of_late(follower: Follower) -> Iterator[Metric]:
    """The ratios of the last minutes, for whoever cannot compute them from the counters, and to compare with them."""
    from prometheus_client.core import GaugeMetricFamily

    goodput = GaugeMetricFamily(
        "chaoskit_recent_goodput_ratio", "Goodput of the last minutes.", labels=["window"]
    )
    words = "Effective training time ratio of the last minutes."
    ettr = GaugeMetricFamily("chaoskit_recent_ettr_ratio", words, labels=["window", "convention"])
    for window, window_s in _WINDOWS.items():
        recently = follower.recently(window_s)
        goodput.add_metric([window], recently.goodput)
        ettr.add_metric([window, "wall"], recently.ettr_wall)
        ettr.add_metric([window, "productive"], recently.ettr_productive)
    yield goodput
    yield ettr


def _of_phases(follower: Follower, live: LiveState) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    places = [(place.rank, name) for name, place in follower.workers.items() if name in live.pulses]
    ranks = {rank: Phase(live.pulses[name].phase) for rank, name in places if rank is not None}
    counted = Counter(ranks.values())
    counts = GaugeMetricFamily("chaoskit_ranks", "Ranks by what they do.", labels=["phase"])
    for phase in Phase:
        counts.add_metric([phase.label], counted[phase])
    yield counts
    if len(ranks) > _RANKS_MAX:
        return
    one = GaugeMetricFamily("chaoskit_phase", "1 for what the rank does.", labels=["rank", "phase"])
    for rank, current in sorted(ranks.items()):
        for phase in Phase:
            one.add_metric([str(rank), phase.label], float(phase == current))
    yield one


def _stands(follower: Follower) -> bool:
    setback = follower.accountant.open
    return setback is not None and not setback.planned


class MetricsServer:
    """Answers scrapes over HTTP until it is closed.

    Raises:
        BadInput: if ``prometheus_client`` is not installed.
    """

    def __init__(self, metrics: RunMetrics, host: str, port: int) -> None:
        require_client(port)
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def require_client(port: int) -> None:
    """Raises BadInput, if metrics cannot be served."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        remedy = "install prometheus_client: pip install 'chaoskit[observe]'"
        raise BadInput("metrics_port", port, remedy) from None
