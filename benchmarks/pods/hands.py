"""Measure hands in pods:
``python -m benchmarks.pods.hands [--count N] [--only CASES] [--namespace NAME]``.

Measured are the time from the call to the answer of a new hand, round trips to a standing one over
pods/attach, the time until packets are dropped, and the time for which effects outlive a client
that is killed. The figures of the prototype stand beside them. Cluster: $KUBECONFIG; its nodes run
on this machine, so that pods can mount its Python. Needs root. Writes results/hands.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save
from benchmarks.pods.hand_pods import (
    ADDRESS,
    CONTAINER,
    HandPods,
    await_until,
    drops_packets,
    is_stopped,
    target_of,
)
from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandRole
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

#: Pods of each case. A run with fewer is a smoke run.
FULL_COUNT = 20
_LASTS_S = 10.0
#: Round trips to a standing hand, for each hand that is asked for.
_TRIPS_PER_HAND = 10
#: Seconds for which an effect may outlive its client.
_OUTLIVES_S = 1.0


_NOTE = (
    "A new hand counts until its first answer: the requests to the API server, the start of the container, a look at it "
    "every 50 ms, and the stream. The prototype counted until its code ran."
)


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A quantity of the table.

    Attributes:
        name: its description.
        prototype: the figures of the prototype, in words.
        limit_s: limit of the worst; None for none.
    """

    name: str
    prototype: str
    limit_s: float | None = None


QUANTITIES = {
    "first": _Quantity(
        "first hand in a pod, until it answers", "140 ms median, 300 ms worst of 8, code runs"
    ),
    "further": _Quantity(
        "further hand, once the one before was closed", "350 ms median, 1090 ms worst of 12"
    ),
    "trip": _Quantity(
        "round trip to a standing hand", "1.7 ms median; to the hand 1.1 ms, 3.4 ms worst of 20"
    ),
    "armed": _Quantity(
        "first network hand, until packets are dropped", "160 ms; as first hand 170 to 400 ms"
    ),
    "cut": _Quantity("packets dropped by a standing network hand", "not measured"),
    "stopped": _Quantity(
        "stop of a process after its client was killed", "13 ms, end of input, once", _OUTLIVES_S
    ),
    "dropped": _Quantity(
        "rules that drop packets after their client was killed", "not measured", _OUTLIVES_S
    ),
}
Samples = dict[str, list[float]]


class _Bench:
    """Pods and the measurements in them.

    Args:
        api: client of the namespace.
        pods: one pod for each first hand.
    """

    def __init__(self, api: KubernetesApi, pods: HandPods) -> None:
        self._api, self._pods = api, pods

    def processes(self) -> Samples:
        """Measure starts of hands on processes, and round trips."""
        samples: Samples = {"first": [], "further": [], "trip": []}
        for pod in self._pods.pods:
            for quantity in ("first", "further"):
                began_s = time.perf_counter()
                with closing(self._start(pod, PROCESSES)) as hand:
                    samples[quantity].append(time.perf_counter() - began_s)
                    if quantity == "first":
                        samples["trip"] += [trip_s(hand) for _ in range(_TRIPS_PER_HAND)]
        return samples

    def network(self) -> Samples:
        """Measure starts of hands on the network until they drop packets, and cuts."""
        samples: Samples = {"armed": [], "cut": []}
        for pod in self._pods.pods:
            began_s = time.perf_counter()
            with closing(self._start(pod, NETWORK)) as hand:
                effect = cut(hand)
                samples["armed"].append(time.perf_counter() - began_s)
                hand.ask("lift", effect=effect)
                began_s = time.perf_counter()
                cut(hand)
                samples["cut"].append(time.perf_counter() - began_s)
        return samples

    def killed(self) -> Samples:
        """Measure how long effects outlive clients that are killed."""
        effects: dict[str, tuple[HandRole, Callable[[psutil.Process], bool]]] = {
            "stopped": (PROCESSES, is_stopped),
            "dropped": (NETWORK, drops_packets),
        }
        samples: Samples = {quantity: [] for quantity in effects}
        for pod in self._pods.pods:
            for quantity, (role, acts) in effects.items():
                samples[quantity].append(self._outlived_s(pod, role, acts))
        return samples

    def _start(self, pod: HandPod, role: HandRole) -> Hand:
        return start_hand(self._api, pod, CONTAINER, role, self._pods.image)

    def _outlived_s(
        self, pod: HandPod, role: HandRole, acts: Callable[[psutil.Process], bool]
    ) -> float:
        """Return the seconds from the end of a client to that of its effect."""
        target, image = target_of(pod), json.dumps(self._pods.image)
        module = [sys.executable, "-m", "benchmarks.pods.hand_client"]
        command = [*module, self._api.namespace, pod.name, pod.uid, role, image]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            try:
                assert client.stdout is not None
                if not client.stdout.readline():
                    raise RuntimeError("the client has ended: see its error above")
                if not acts(target):
                    raise RuntimeError(f"no effect of the hand on {role} in {pod.name}")
            finally:
                killed_s = time.perf_counter()
                client.kill()
            await_until(lambda: not acts(target), f"the end of the effect in {pod.name}")
            return time.perf_counter() - killed_s


CASES: dict[str, Callable[[_Bench], Samples]] = {
    "processes": _Bench.processes,
    "network": _Bench.network,
    "killed": _Bench.killed,
}


def trip_s(hand: Hand) -> float:
    """Return the seconds of a round trip to a hand."""
    began_s = time.perf_counter()
    hand.ask("ping")
    return time.perf_counter() - began_s


def cut(hand: Hand) -> int:
    """Cut a pod off from an address, and return the number of the effect."""
    answer = hand.ask("cut", addresses=[ADDRESS], lasts_s=_LASTS_S)
    if not answer["armed"]:
        raise RuntimeError(f"the rules are not in place: {answer}")
    return int(answer["number"])


def bar_of(topic: str, seconds: Sequence[float]) -> Bar:
    """Return the bar of a quantity."""
    quantity = QUANTITIES[topic]
    middle_ms, worst_ms = median(seconds) * 1e3, max(seconds) * 1e3
    limit_s = quantity.limit_s
    return Bar(
        topic=topic,
        name=quantity.name,
        measured=f"{middle_ms:.1f} ms median, {worst_ms:.1f} ms worst of {len(seconds)}"
        f" (prototype: {quantity.prototype})",
        limit="" if limit_s is None else f"{limit_s:g} s",
        met=None if limit_s is None else max(seconds) <= limit_s,
        samples={"seconds": list(seconds)},
    )


def measure(case: str, api: KubernetesApi, count: int) -> list[Bar]:
    """Return the bars of a case, which gets new pods."""
    with closing(HandPods(api, count)) as pods:
        samples = CASES[case](_Bench(api, pods))
    return [bar_of(topic, seconds) for topic, seconds in samples.items()]


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
    parser.add_argument("--count", type=int, default=FULL_COUNT, help="number of pods of each case")
    parser.add_argument("--namespace", default="default", help="where the pods are created")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    machine, bars = look_at_machine(), list[Bar]()
    api = KubernetesApi(kubeconfig=os.environ["KUBECONFIG"], namespace=options.namespace)
    with closing(api):
        for case in options.only:
            measured = measure(case, api, options.count)
            for bar in measured:
                show_progress(f"{bar.name}: {bar.measured}")
            bars += measured
    smoke = options.count < FULL_COUNT
    report = Report(machine=machine, smoke=smoke, bars=bars, notes=[_NOTE])
    save(report, options.results, "hands")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
