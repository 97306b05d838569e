"""Count records lost by pods that end:
``python -m benchmarks.pods.records [--runs N] [--power] [--json FILE]``.

A rank prints a thousand records a second, and its pod ends in each way in turn. A witness, a file
of this machine that is mounted into the pod, has the number of the last printed record. Printed
records that did not arrive are counted. It needs a cluster whose machines see the files of this
one. Image and namespace: the variables of ``docs/kubernetes.md``; the template is in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import tempfile
from collections import Counter
from pathlib import Path

from chaoskit.experiment.harness import Harness
from chaoskit.vocabulary import Verdict
from faults import DeletePod, EvictPod, Fault, Kill, KillContainer, LoseMachine

JOB = f"{Path(__file__).parent / 'records_job.py'}:train"
STEPS, AT, STEP_S = 120, 30, 0.03
WAYS: tuple[Fault, ...] = (
    Kill(rank=1, at_step=AT),
    KillContainer(rank=1, at_step=AT),
    DeletePod(rank=1, at_step=AT),
    DeletePod(rank=1, at_step=AT, grace_s=2),
    EvictPod(rank=1, at_step=AT, grace_s=2),
)
TEMPLATE = "CHAOSKIT_KUBERNETES_TEMPLATE"
_RECORD = re.compile(r"^record (\S+) (\d+)$", re.MULTILINE)


def seen_by_pods(directory: Path) -> None:
    """Mount a directory of this machine into the pods, writable."""
    template = json.loads(Path(os.environ[TEMPLATE]).read_text())
    (container,) = (
        container for container in template["spec"]["containers"] if container["name"] == "node"
    )
    container["volumeMounts"].append({"name": "witness", "mountPath": str(directory)})
    template["spec"]["volumes"].append({"name": "witness", "hostPath": {"path": str(directory)}})
    (directory / "template.json").write_text(json.dumps(template))
    os.environ[TEMPLATE] = str(directory / "template.json")


def printed(directory: Path) -> dict[str, int]:
    """Return the number of records that each process has printed, by the witness."""
    contents = {
        path.name: path.read_bytes() for path in directory.iterdir() if len(path.read_bytes()) == 8
    }
    return {name: struct.unpack("<q", data)[0] + 1 for name, data in contents.items()}


def lost(harness: Harness, fault: Fault, witness: Path) -> tuple[int, int]:
    """Run with ``fault``; return the number of records lost, repeated or out of order, and of all
    printed ones.
    """
    before = set(printed(witness))
    options = {"step_s": STEP_S, "witness": str(witness)}
    more = {"steps": 300} if isinstance(fault, KillContainer) else {}
    outcome = harness.run(
        JOB, faults=[fault], options=options, twin=False, **({"nodes": 3, "steps": STEPS} | more)
    )
    if outcome.verdict is not Verdict.PASSED and not isinstance(fault, LoseMachine):
        raise RuntimeError("; ".join(outcome.reasons))
    received: dict[str, list[int]] = {}
    for path in sorted((Path(outcome.directory) / "log").glob("node*.*.log")):
        for name, number in _RECORD.findall(path.read_text(errors="replace")):
            received.setdefault(name, []).append(int(number))
    expected = {name: number for name, number in printed(witness).items() if name not in before}
    absent = Counter(
        {name: number - len(set(received.get(name, ()))) for name, number in expected.items()}
    )
    disordered = sum(numbers != sorted(set(numbers)) for numbers in received.values())
    # the pod may end after a record is printed and before the witness has its number
    return sum(max(0, number) for number in absent.values()) + disordered, sum(expected.values())


def main() -> None:
    """Measure, print a line for each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4, help="of each way")
    parser.add_argument("--power", action="store_true", help="cut the power of its machine, too")
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    measured: dict[str, list[tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as runs:
        witness = Path(directory)
        witness.chmod(0o777)
        seen_by_pods(witness)
        ways = (*WAYS, *([LoseMachine(rank=1, at_step=AT)] if arguments.power else []))
        with Harness("kubernetes", runs) as harness:
            for _ in range(arguments.runs):
                for fault in ways:
                    counts = lost(harness, fault, witness)
                    measured.setdefault(str(fault), []).append(counts)
                    print(f"{fault!s:45} {counts[0]:5} of {counts[1]:6} lost", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
