"""What a launch offers to those who look at it: a file with its heartbeats, metrics, traces, and the account."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from chaoskit.observe import otel
from chaoskit.observe.follow import Follower
from chaoskit.observe.live import Live, LiveFile
from chaoskit.observe.metrics import LOOPBACK, MetricsServer, RunMetrics, require_client
from chaoskit.process.host_checks import require_free_port
from chaoskit.runlog.account.time_account import TimeAccount

_POLL_EVERY_S = 1.0


class Observation:
    """Looks at one run while it lasts; a context manager. :meth:`watch` hears every message of the coordinator.

    Args:
        directory: of the run.
        metrics_port: of the Prometheus endpoint; 0 for any, None for none.
        metrics_host: where it listens.
        otlp_endpoint: where spans are sent; "" for nowhere.

    Attributes:
        metrics_url: of the endpoint; "" where there is none.
        exported: whether the receiver took all spans; None where none were sent.

    Raises:
        BadInput: if a port is taken, an address is none, or a library is missing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        metrics_port: int | None = None,
        metrics_host: str = LOOPBACK,
        otlp_endpoint: str = "",
    ) -> None:
        require_observable(metrics_port, metrics_host, otlp_endpoint)
        self._live, self._lock = Live(), threading.RLock()
        self._file = LiveFile(directory, self._live)
        self._metrics = RunMetrics(self._live, self._lock)
        self._follower = Follower(
            directory, on_step=self._metrics.observe_step, on_setback=self._metrics.observe_setback
        )
        self._metrics.follower = self._follower
        self._polled_s = time.monotonic()
        self.exported: bool | None = None
        self._export = (
            otel.LiveExport(otel.validate_endpoint("otlp_endpoint", otlp_endpoint))
            if otlp_endpoint
            else None
        )
        self._server: MetricsServer | None = None
        if metrics_port is not None:
            self._server = MetricsServer(self._metrics, metrics_host, metrics_port)
        self.metrics_url = self._server.url if self._server else ""

    def __enter__(self) -> Observation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
            self._follower.finish()
            if self._export is not None:
                self.exported = self._export.finish(self._follower)

    def watch(self, message: Any) -> None:
        """Take in a message of the coordinator."""
        self._live.hear(message)
        self._file.refresh()
        now_s = time.monotonic()
        if (
            now_s - self._polled_s >= _POLL_EVERY_S
        ):  # a little now and then, rather than all at the end
            self._polled_s = now_s
            with self._lock:
                self._follower.poll()
                if self._export is not None:
                    self._export.update(self._follower)

    def account(self, ended_ns: int) -> TimeAccount:
        """Of the run that has ended at ``ended_ns``."""
        return self._follower.accountant.account(ended_ns)


def require_observable(metrics_port: int | None, metrics_host: str, otlp_endpoint: str) -> None:
    """Refuse what an :class:`Observation` cannot offer, before anything is started.

    Raises:
        BadInput: if a port is taken, an address is none, or a library is missing.
    """
    if metrics_port is not None:
        require_client(metrics_port)
        require_free_port("metrics_port", metrics_host, metrics_port)
    if otlp_endpoint:
        otel.validate_endpoint("otlp_endpoint", otlp_endpoint)
