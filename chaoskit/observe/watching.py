"""Observation of a launched run: a file of heartbeats, metrics, traces, and the time account.

-> launcher/launch.py opens it. observe/follower.py: the state of a run that this process does not
launch, as ``chaoskit top`` reads it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from chaoskit.observe import otel
from chaoskit.observe.follower import Follower
from chaoskit.observe.live import Live, LiveFile
from chaoskit.observe.metrics import LOOPBACK, MetricsServer, RunMetrics, require_client
from chaoskit.process.host_checks import require_free_port
from chaoskit.runlog.account.time_account import TimeAccount

_POLL_EVERY_S = 1.0


class Observation:
    """The observation of one run while it lasts, as a context manager.

    :meth:`watch` must receive every message of the coordinator. At its end the context reads the
    remaining records, sends the remaining spans and stops the endpoint.

    Args:
        directory: the directory of the run.
        metrics_port: the port of the Prometheus endpoint; 0 for any, None for none.
        metrics_host: the address on which it listens.
        otlp_endpoint: the address to which spans are sent; "" for none.

    Attributes:
        metrics_url: the address of the endpoint; "" if there is none.
        exported: True if the receiver accepted all spans; None without ``otlp_endpoint``, and until
            the end.

    Raises:
        BadInput: if a port is taken, an address is invalid, or a library is missing.
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
        """Process a message of the coordinator, and poll the run at most once a second.

        The file of heartbeats is written, and recoveries that are complete are queued for export.
        """
        self._live.update(message)
        self._file.refresh()
        now_s = time.monotonic()
        if (
            now_s - self._polled_s >= _POLL_EVERY_S
        ):  # reading at intervals spreads the work, which would otherwise come at the end
            self._polled_s = now_s
            with self._lock:
                self._follower.poll()
                if self._export is not None:
                    self._export.update(self._follower)

    def account(self, ended_ns: int) -> TimeAccount:
        """Return the time account of a run that ended at ``ended_ns`` on CLOCK_MONOTONIC.

        It is complete only after the context, which reads the last records when it ends.
        """
        return self._follower.accountant.account(ended_ns)


def require_observable(metrics_port: int | None, metrics_host: str, otlp_endpoint: str) -> None:
    """Check the arguments of an :class:`Observation` before anything is started.

    Raises:
        BadInput: if a port is taken, an address is invalid, or a library is missing.
    """
    if metrics_port is not None:
        require_client(metrics_port)
        require_free_port("metrics_port", metrics_host, metrics_port)
    if otlp_endpoint:
        otel.validate_endpoint("otlp_endpoint", otlp_endpoint)
