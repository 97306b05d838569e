"""Records of pods that end: ``python -m benchmarks.pods.records [--runs N] [--power] [--json FILE]``.

A rank prints a thousand records a second, and its pod ends in each way in turn. A witness, a file of this machine that
the pod sees, knows which records were printed: those that did not come are counted. It needs a cluster whose machines
see this one's files. Which image and namespace: the variables of ``docs/kubernetes.md``; the template is in JSON.
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
    """Have pods see a directory of this machine, and write there."""
    told = json.loads(Path(os.environ[TEMPLATE]).read_text())
    (node,) = (one for one in told["spec"]["containers"] if one["name"] == "node")
    node["volumeMounts"].append({"name": "witness", "mountPath": str(directory)})
    told["spec"]["volumes"].append({"name": "witness", "hostPath": {"path": str(directory)}})
    (directory / "template.json").write_text(json.dumps(told))
    os.environ[TEMPLATE] = str(directory / "template.json")


def printed(directory: Path) -> dict[str, int]:
    """How many records each process has printed, by the witness."""
    found = {
        path.name: path.read_bytes() for path in directory.iterdir() if len(path.read_bytes()) == 8
    }
    return {name: struct.unpack("<q", data)[0] + 1 for name, data in found.items()}


def lost(harness: Harness, fault: Fault, witness: Path) -> tuple[int, int]:
    """Of one run: records that did not come, or twice, or out of order; and all that were printed."""
    before = set(printed(witness))
    options = {"step_s": STEP_S, "witness": str(witness)}
    more = {"steps": 300} if isinstance(fault, KillContainer) else {}
    outcome = harness.run(
        JOB, faults=[fault], options=options, twin=False, **({"nodes": 3, "steps": STEPS} | more)
    )
    if outcome.verdict is not Verdict.PASSED and not isinstance(fault, LoseMachine):
        raise RuntimeError("; ".join(outcome.reasons))
    come: dict[str, list[int]] = {}
    for path in sorted((Path(outcome.directory) / "log").glob("node*.*.log")):
        for name, number in _RECORD.findall(path.read_text(errors="replace")):
            come.setdefault(name, []).append(int(number))
    wanted = {name: number for name, number in printed(witness).items() if name not in before}
    absent = Counter(
        {name: number - len(set(come.get(name, ()))) for name, number in wanted.items()}
    )
    disordered = sum(numbers != sorted(set(numbers)) for numbers in come.values())
    # one record may be printed, and not told to the witness, at the moment of the end
    return sum(max(0, number) for number in absent.values()) + disordered, sum(wanted.values())


def main() -> None:
    """Measure, print a line a run, and write what was measured."""
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
                    found = lost(harness, fault, witness)
                    measured.setdefault(str(fault), []).append(found)
                    print(f"{fault!s:45} {found[0]:5} of {found[1]:6} lost", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
