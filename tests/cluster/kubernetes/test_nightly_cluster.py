"""Tests of nightly runs in a namespace of a real cluster, from their CronJob: killed, refused, and
kept apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.nodes import pods
from support.repository import CALM, KILLS, Project
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.history.record import NightRecord
from chaoskit.history.session import read
from chaoskit.nightly.places import LEASE
from chaoskit.nightly.watch import AbortCondition, NightAborted, watched
from chaoskit.substrate.kubernetes.api.lease import GIVE_UP_S, LEASE_S, NamespaceLease
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.installation import installation
from chaoskit.substrate.kubernetes.machines.machines import BROKEN
from chaoskit.substrate.kubernetes.nights import NIGHT_JOB, NIGHTLY, NightlyJob, nightly_job
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.substrate.kubernetes.pods.manifests import ALLOWED, SESSION

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}")
]

PLAN = """
version: 1
name: small
tests: [test_it.py]
control: [test_calm.py]
repeats: 1
substrate: kubernetes
directory: /nights
history: /nights/history
"""
_EVERY_MINUTE = "* * * * *"
_BATCH = "/apis/batch/v1"
_ENDS = ("Complete", "Failed")


class Nights:
    """The CronJob of a repository, and the nights that it has started.

    ``volume``: the directory of this machine that its pods mount.
    """

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self._jobs = f"{_BATCH}/namespaces/{pods.namespace()}/jobs"

    def begin(self) -> str:
        """Wait until the cluster has made the first Job, and suspend the CronJob."""
        wait_until(self._night_jobs, "the Job of the CronJob", limit_s=90)
        path = f"{_BATCH}/namespaces/{pods.namespace()}/cronjobs/{NIGHTLY}"
        pods.ask("PATCH", path, {"spec": {"suspend": True}})
        return str(self._night_jobs()[0]["metadata"]["name"])

    def _night_jobs(self) -> list[Any]:
        jobs = pods.ask("GET", self._jobs)["items"]
        return [job for job in jobs if job["metadata"]["name"].startswith(NIGHTLY)]

    def state(self) -> str:
        """Return ``Complete``, ``Failed``, or "" while the Job runs."""
        conditions = self._night_jobs()[0]["status"].get("conditions", ())
        return next(
            (
                condition["type"]
                for condition in conditions
                if condition["status"] == "True" and condition["type"] in _ENDS
            ),
            "",
        )

    def pods(self) -> dict[str, Any]:
        """Return the pods in which the night ran."""
        return pods.pods("app.kubernetes.io/component=night")

    def last_log(self) -> str:
        """Return the log of the newest of the pods."""
        last = max(self.pods().values(), key=lambda pod: pod["metadata"]["creationTimestamp"])
        return pods.log(last["metadata"]["name"])

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the night's log so far."""
        files = [*self.volume.glob("*-small-*/night.jsonl")]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def nights(self) -> list[NightRecord]:
        return read(str(self.volume / "history")).nights


def processes_of_night() -> list[psutil.Process]:
    """Return the first processes of the night's pods, as this machine sees them."""
    arguments = ["-m", "chaoskit", "nightly", "run"]
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[1:5] == arguments
    ]


@contextlib.contextmanager
def nights_of(project: Project, volume: Path, **variables: str) -> Iterator[Nights]:
    """Provide the CronJob as users install it.

    Its pods get this machine's Python and the repository, as if from an image.
    """
    project.path.chmod(0o755)
    volume.mkdir()
    volume.chmod(0o777)
    name = f"{pods.namespace()}-nights"
    variables |= {
        "CHAOSKIT_KUBERNETES_TEMPLATE": "/nights/template.json",
        "CHAOSKIT_KUBERNETES_PYTHON": sys.executable,
    }
    pods.template(volume)
    claim = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name}
    claim |= {"resources": {"requests": {"storage": "1Gi"}}}
    job = NightlyJob(pods.IMAGE, schedule=_EVERY_MINUTE)
    manifests = [
        manifest
        for manifest in installation(pods.namespace(), "restricted")
        if manifest["kind"] != "Namespace"
    ]
    manifests += [
        {"kind": "PersistentVolumeClaim", "metadata": {"name": NIGHTLY}, "spec": claim},
        {"kind": "ConfigMap", "metadata": {"name": NIGHTLY}, "data": variables},
        *nightly_job(pods.namespace(), job),
    ]
    as_an_image_would(manifests[-1], project)
    with persistent_volume(name, volume), pods.installed(manifests):
        yield Nights(volume)
    wait_until(
        lambda: not pods.pods("app.kubernetes.io/component=night"),
        "the end of its pods",
        limit_s=90,
    )


def as_an_image_would(cron_job: dict[str, Any], project: Project) -> None:
    spec = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes, mounted = pods.mounts()
    spec["volumes"] += [*volumes, {"name": "repository", "hostPath": {"path": str(project.path)}}]
    container["volumeMounts"] += [
        *mounted,
        {"name": "repository", "mountPath": "/repository", "readOnly": True},
    ]
    container["command"][:1] = [sys.executable, "-m", "chaoskit"]
    container["workingDir"] = "/repository"


@contextlib.contextmanager
def persistent_volume(name: str, path: Path) -> Iterator[None]:
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(path)},
    }
    body = {"kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    pods.ask("POST", "/api/v1/persistentvolumes", body)
    try:
        yield
    finally:
        pods.ask("DELETE", f"/api/v1/persistentvolumes/{name}")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    made.write(**{"nightly.yaml": PLAN, "test_calm.py": CALM, "test_it.py": KILLS})
    made.commit()
    return made


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("A pod that is killed is followed by another one, which goes on")
def test_a_night_whose_pod_is_killed_goes_on_in_another_one(
    project: Project, tmp_path: Path
) -> None:
    with nights_of(project, tmp_path / "volume") as nights:
        nights.begin()
        wait_until(lambda: len(nights.lines()) >= 3, "the second test of the night", limit_s=180)
        (process,) = processes_of_night()
        process.kill()
        wait_until(nights.state, "the end of the night", limit_s=300)
        assert nights.state() == "Complete", nights.last_log()
        assert len(nights.pods()) == 2
        assert "resuming" in nights.last_log()
        assert re.search(
            r"ended session chaoskit-\w+ of \S+, process 1, \w{6}\n", nights.last_log()
        )
        wait_until(
            lambda: not pods.pods(SESSION), "the end of what the killed one had begun", limit_s=120
        )
    (night,) = nights.nights()
    assert [(unit.part, unit.test.partition("[")[2], unit.runs) for unit in night.units] == [
        ("control", "", 1),
        ("experiments", "4]", 1),
        ("experiments", "6]", 1),
        ("experiments", "7]", 1),
    ]
    assert night.environment["namespace"] == pods.namespace()
    assert night.lines == []


@pytest.mark.costly
@pytest.mark.slow
def test_a_night_with_a_finding_is_not_begun_again(project: Project, tmp_path: Path) -> None:
    """The night is complete, and its Job failed, as its exit status says."""
    project.write(
        **{
            "test_it.py": "def test_false(chaos):\n    chaos.run('train.py', nodes=2, steps=6)\n    assert 0\n"
        }
    )
    project.write(**{"nightly.yaml": PLAN.replace("control: [test_calm.py]\n", "")})
    project.commit()
    with nights_of(project, tmp_path / "volume") as nights:
        nights.begin()
        wait_until(nights.state, "the end of the night", limit_s=300)
        assert nights.state() == "Failed"
        assert len(nights.pods()) == 1
        wait_until(lambda: not pods.pods(SESSION), "the end of its session", limit_s=60)
    (night,) = nights.nights()
    assert night.exit_code == 1
    assert [unit.failures for unit in night.units] == [1]
    assert night.lines == []


TAINT = """
from faults import TaintMachine

def test_taint(chaos):
    chaos.run("train.py", nodes=2, spares=0, steps=400, twin=False, faults=[TaintMachine(rank=1, at_step=30)])
"""


@pytest.mark.costly
@pytest.mark.slow
def test_a_night_that_is_killed_at_any_moment_leaves_nothing(
    project: Project, tmp_path: Path
) -> None:
    """The guard is killed, too, as when a pod ends; the next night removes what is left.

    Two moments a night are tried; CHAOSKIT_MOMENTS=10 tries twenty.
    """
    project.write(**{"test_it.py": TAINT, "nightly.yaml": PLAN.replace("/nights", str(tmp_path))})
    project.commit()
    settings = {"MACHINES": ",".join(pods.machines()[1:]), "STRANGERS": "allow"}
    own = pods.environment(tmp_path) | {
        f"{VARIABLE}{name}": setting for name, setting in settings.items()
    }
    own |= {NIGHT_JOB: "one"}
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*alone, sys.executable, "-m", "chaoskit", "nightly", "run", "nightly.yaml"]
    moments = random.Random(int(os.environ.get("CHAOSKIT_MOMENTS", "1")))
    before = set(pods.everything())
    for _ in range(2 * int(os.environ.get("CHAOSKIT_MOMENTS", "1"))):
        with subprocess.Popen(
            command, cwd=project.path, env=own, stderr=subprocess.DEVNULL
        ) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(2, 60))  # the night may be over by then
            process.kill()
    done = subprocess.run(
        command, cwd=project.path, env=own, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    wait_until(
        lambda: set(pods.everything()) <= before,
        "the end of all that they have made",
        limit_s=60,
        poll_s=0.5,
    )
    nodes = [pods.ask("GET", f"/api/v1/nodes/{machine}") for machine in pods.machines()]
    assert [node["spec"].get("taints") for node in nodes] == [None] * len(nodes)
    assert not any(BROKEN in node["metadata"].get("annotations", {}) for node in nodes)


# -- one at a time ---------------------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    made = KubernetesApi(namespace=pods.namespace())
    yield made
    made.delete("Lease", LEASE)
    made.close()


def ignore(message: str) -> None:
    """Ignore a message of the lease."""


def lease_of(api: KubernetesApi, holder: str, lasts_s: int = 3, job: str = "") -> NamespaceLease:
    return NamespaceLease(api, LEASE, holder, holder_kind="a night", job=job, lasts_s=lasts_s)


def test_a_lease_has_one_holder(api: KubernetesApi) -> None:
    first, messages = lease_of(api, "one"), list[str]()
    assert first.take(messages.append) == ""
    with first.renewed(0.3), pytest.raises(BadInput, match="wait: a night of one runs there"):
        lease_of(api, "two").take(messages.append)
    (message,) = messages
    assert message == (
        "a night of one holds the Lease of this namespace; "
        "waiting for up to 3 s to see whether it is renewed"
    )
    assert first.trouble == ""
    first.release()
    assert lease_of(api, "two").take(messages.append) == ""
    assert len(messages) == 1


def test_the_lease_of_a_holder_that_died_is_taken(api: KubernetesApi) -> None:
    """The lease is taken once it has not changed for its own duration; the old holder, if it lives,
    must stop.
    """
    first, second = lease_of(api, "one"), lease_of(api, "two")
    first.take(ignore)
    began_s = time.monotonic()
    assert second.take(ignore) == "one"
    assert time.monotonic() - began_s >= 3
    first.renew()
    assert first.trouble == f"a night of two has taken the namespace {pods.namespace()}"
    first.release()
    second.renew()
    assert second.trouble == ""


def test_another_pod_of_a_job_goes_on_at_once(api: KubernetesApi) -> None:
    """The earlier pod, on an unreachable machine and so believed dead, must stop."""
    first, second = lease_of(api, "one", 600, "uid"), lease_of(api, "two", 600, "uid")
    first.take(pytest.fail)
    assert second.take(pytest.fail) == "one"
    first.renew()
    assert first.trouble.startswith("a night of two has taken")


def test_a_lease_that_two_want_at_once_has_one_of_them(api: KubernetesApi) -> None:
    lease_of(api, "gone", lasts_s=2).take(ignore)
    holders = [lease_of(api, f"number {number}", lasts_s=2) for number in range(4)]
    with ThreadPoolExecutor() as pool:
        refused = [
            future.exception()
            for future in [pool.submit(holder.take, ignore) for holder in holders]
        ]
    assert [type(error) for error in refused if error is not None] == [BadInput] * 3
    for holder in holders:
        holder.renew()
    assert sum(holder.trouble == "" for holder in holders) == 1


def test_a_renewal_whose_answer_is_lost_ends_nothing(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal is sent again and is refused, since it changed the Lease itself."""
    lease = lease_of(api, "one")
    lease.take(ignore)
    once = api.patch

    def twice(kind: str, name: str, change: Any) -> Any:
        once(kind, name, change)
        return once(kind, name, change)

    monkeypatch.setattr(api, "patch", twice)
    lease.renew()
    assert lease.trouble == ""


def test_a_server_that_is_away_is_waited_for(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder stops once it could not renew for the whole limit, and no sooner."""
    lease = lease_of(api, "one")
    lease.take(ignore)

    def away(kind: str, name: str) -> Any:
        raise ApiError("the API server does not answer")

    monkeypatch.setattr(api, "get", away)
    lease.renew()
    assert lease.trouble == ""
    monkeypatch.setattr("chaoskit.substrate.kubernetes.api.lease.GIVE_UP_S", 0.0)
    lease.renew()
    assert (
        lease.trouble
        == f"the Lease {LEASE} could not be renewed for 0 s: the API server does not answer"
    )
    assert GIVE_UP_S + 120 < LEASE_S  # pytest may take as long to put back what it has broken


def test_a_night_ends_where_its_lease_is_lost(api: KubernetesApi) -> None:
    lease = lease_of(api, "one")
    lease.take(ignore)

    def lose() -> None:
        with lease.renewed(0.1), watched([AbortCondition(lambda: lease.trouble, 0.1)]):
            api.delete("Lease", LEASE)
            time.sleep(10)

    with pytest.raises(
        NightAborted, match=f"the Lease {LEASE} of namespace {pods.namespace()} is gone"
    ):
        lose()


# -- refused ---------------------------------------------------------------------------------------


def begin(project: Project, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    project.write(**{"nightly.yaml": PLAN.replace("/nights", str(directory))})
    command = [sys.executable, "-m", "chaoskit", "nightly", "run", "nightly.yaml"]
    own = pods.environment(directory) | variables
    return subprocess.run(
        command, cwd=project.path, env=own, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_night_in_a_namespace_that_does_not_allow_it_is_refused(
    project: Project, tmp_path: Path
) -> None:
    before = pods.everything()
    done = begin(project, tmp_path, CHAOSKIT_KUBERNETES_NAMESPACE="default")
    assert done.returncode == 2
    assert f"kubectl label namespace default {ALLOWED}=allowed" in done.stderr
    assert not [*tmp_path.glob("*-small-*")]
    assert pods.everything() == before


@pytest.mark.promise("A second night in a namespace is refused")
def test_a_second_night_in_the_namespace_is_refused(
    api: KubernetesApi, project: Project, tmp_path: Path
) -> None:
    """The other night runs on another machine, which shares no lock with this one."""
    lease = lease_of(api, "another machine")
    lease.take(ignore)
    with lease.renewed(0.3):
        done = begin(project, tmp_path)
    assert done.returncode == 2
    assert "wait: a night of another machine runs there" in done.stderr
    assert not [*tmp_path.glob("*-small-*")]


def test_a_night_without_a_right_to_its_lease_is_refused(project: Project, tmp_path: Path) -> None:
    with pods.person() as kubeconfig:
        (tmp_path / "kubeconfig").write_text(kubeconfig)
        done = begin(project, tmp_path, KUBECONFIG=str(tmp_path / "kubeconfig"))
    assert done.returncode == 2
    assert "leases there, for one night at a time in the namespace" in done.stderr
