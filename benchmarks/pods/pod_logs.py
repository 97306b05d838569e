"""Count lost, told and doubled lines of followed logs:
``python -m benchmarks.pods.pod_logs [--quick] [--only CASES] [--namespace NAME]``.

Pods print numbered lines while containers are killed, streams are cut, files are rotated and pods
are deleted. A line is lost if it was not delivered, told if it lies in a reported hole, and doubled
if it was delivered again. Cluster: $KUBECONFIG; its nodes run on this machine, so that pods can
mount its Python. Writes results/pod_logs.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save
from benchmarks.pods.api_proxy import ApiProxy
from benchmarks.pods.log_cases import (
    LineCounts,
    LoggingPod,
    away,
    cutting,
    deleted,
    deleted_while_away,
    killed,
    restarted_while_away,
    silenced,
)
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

_LIMIT = "no line lost silently, none doubled"
_WHOLE = "no line lost, none doubled"


@dataclass(frozen=True, slots=True)
class _Case:
    """A case of the table.

    Attributes:
        name: description of the case.
        act: what happens to a pod.
        writer: arguments of the writer.
        is_whole: True if no line may be lost, and False if each lost line must be told.
    """

    name: str
    act: Callable[[LoggingPod], LineCounts]
    writer: dict[str, Any]
    is_whole: bool = True


def _killed_and_cut(pod: LoggingPod) -> LineCounts:
    with cutting(pod.proxy, 0.7):
        return killed(pod, 5)


_STEADY = {"rate": 200, "seconds": 3, "lives": 6}
_FAST = {"rate": 15000, "size_bytes": 200, "streams": 1}
CASES = {
    "killed": _Case(
        "container killed 5 times, 200 lines/s on both streams", lambda pod: killed(pod, 5), _STEADY
    ),
    "cut": _Case("the same, all streams cut every 0.7 s", _killed_and_cut, _STEADY),
    "lives": _Case(
        "20 lives of 0.3 s",
        lambda pod: pod.await_end(150),
        {"rate": 200, "seconds": 0.3, "lives": 20},
    ),
    "rotated": _Case(
        "3 MB/s for 40 s, several rotations, one stream",
        lambda pod: pod.await_end(150),
        {**_FAST, "seconds": 40},
        False,
    ),
    "deleted-0": _Case(
        "pod deleted with grace 0 s while it is followed",
        lambda pod: deleted(pod, 0),
        {"rate": 500, "seconds": 60},
    ),
    "deleted-5": _Case(
        "pod deleted with grace 5 s while it is followed",
        lambda pod: deleted(pod, 5),
        {"rate": 500, "seconds": 60, "grace_s": 5},
    ),
    "silent": _Case(
        "streams silent without an end", silenced, {"rate": 200, "seconds": 10, "silence_s": 2.0}
    ),
    "away": _Case(
        "away for 20 s at 3 MB/s", lambda pod: away(pod, 20.0), {**_FAST, "seconds": 30}, False
    ),
    "deleted-away": _Case(
        "pod deleted while its streams are cut",
        deleted_while_away,
        {"rate": 500, "seconds": 60},
        False,
    ),
    "restarted-away": _Case(
        "two restarts while its streams are cut",
        lambda pod: restarted_while_away(pod, 2),
        {"rate": 200, "seconds": 6, "lives": 3},
        False,
    ),
}
QUICK = ("killed", "deleted-0", "deleted-away")


def measure(name: str, api: KubernetesApi, proxy: ApiProxy) -> Bar:
    """Return the bar of a case."""
    case = CASES[name]
    pod = LoggingPod(api, proxy, **case.writer)
    try:
        counts = case.act(pod)
    finally:
        proxy.refuse(refuses=False)
        proxy.silence(is_silent=False)
        pod.close()
    silent = counts.lost - counts.in_holes
    return Bar(
        topic=name,
        name=case.name,
        measured=f"{counts.written} lines: {counts.lost} lost, {counts.in_holes} told, {counts.doubled} doubled, "
        f"{counts.holes} holes, {counts.openings} streams",
        limit=_WHOLE if case.is_whole else _LIMIT,
        met=counts.doubled == 0 and (counts.lost if case.is_whole else silent) == 0,
        timed=False,
    )


def main() -> int:
    """Measure the cases one after the other, print the table, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        type=lambda text: choose(text, CASES),
        default=list(CASES),
        metavar="CASES",
        help=", ".join(CASES),
    )
    parser.add_argument("--quick", action="store_true", help=f"a smoke run: {', '.join(QUICK)}")
    parser.add_argument("--namespace", default="default", help="where the pods are created")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    machine, bars = look_at_machine(), list[Bar]()
    kubeconfig = os.environ["KUBECONFIG"]
    api = KubernetesApi(kubeconfig=kubeconfig, namespace=options.namespace)
    with tempfile.TemporaryDirectory() as directory:
        proxy = ApiProxy(kubeconfig, Path(directory))
        for name in QUICK if options.quick else options.only:
            bars.append(measure(name, api, proxy))
            show_progress(f"{bars[-1].name}: {bars[-1].measured}")
        proxy.close()
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "pod_logs")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
