"""Jobs of the tests' cluster whose pods train for real: torchrun, DistributedDataParallel, gloo.

All pods share a directory of this machine, in which each rank records its steps by this machine's
monotonic clock. So tests measure recoveries without the cluster's API and without logs.

-> ``tests/jobs/attached/ddp.py``: the training. ``cluster.py`` creates its objects.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from support.hand.client import directory
from support.hand.in_pods import RESTRICTED
from support.jobs import cluster
from support.jobs.controller import controllers
from support.jobs.jobset import defaulted
from support.nodes import pods
from support.waiting import wait_until

TrainingKind = Literal["statefulset", "job", "jobset", "trainjob"]
PodSecurity = Literal["privileged", "baseline", "restricted"]

SCRIPT = pods.ROOT / "tests" / "jobs" / "attached" / "ddp.py"
#: The directory that all pods share, as they see it.
SHARED = "/training"
RENDEZVOUS_PORT = 29400
#: Seconds until a training of three pods has shown its first steps on a busy machine.
START_LIMIT_S = 120.0
#: Seconds within which each step must end.
STEP_LIMIT_S = 6.0
#: Failed containers and pods of a Job, or restarts of a JobSet, before it fails.
_MANY = 1000
_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_RENDEZVOUS = {
    # A limit of requests to the store, and of the connection to it: pods do not start together.
    "read_timeout": 30,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 3,  # a killed agent leaves the rendezvous 6 s later
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else no attempt after the first one finds its store
    "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
    "USER": "training",  # the user has no name in the image
}


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that a rank has recorded.

    Attributes:
        at_ns: its end by the monotonic clock of this machine.
        step: its number.
        rank: the rank.
        pod: host name of the pod.
    """

    at_ns: int
    step: int
    rank: int
    pod: str


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A job that trains on the tests' cluster.

    Attributes:
        kind: its kind.
        name: name of its object.
        namespace: its namespace.
        directory: the directory of this machine that its pods share.
    """

    kind: TrainingKind
    name: str
    namespace: str
    directory: Path

    @property
    def reference(self) -> str:
        """The reference to the job, such as ``statefulset/llama``."""
        return f"{self.kind}/{self.name}"

    def recorded_steps(self) -> list[RecordedStep]:
        """Return the steps that all ranks have recorded so far, in the order of their ends."""
        steps = []
        for file in self.directory.glob("record-*"):
            # The last line may not be complete yet.
            for line in file.read_text().split("\n")[:-1]:
                at_ns, step, rank = map(int, line.split())
                steps.append(RecordedStep(at_ns, step, rank, file.name.partition("-")[2]))
        return sorted(steps, key=lambda step: step.at_ns)

    def newest_step(self) -> int:
        """Return the highest step that a rank has recorded; 0 before the first."""
        return max((step.step for step in self.recorded_steps()), default=0)

    def wait_for_step(self, step: int, limit_s: float = START_LIMIT_S) -> None:
        """Wait until a step is recorded.

        Raises:
            AssertionError: if it is not recorded within the limit.
        """
        wait_until(
            lambda: self.newest_step() >= step,
            f"step {step} of {self.reference}",
            limit_s=limit_s,
            poll_s=0.05,
        )

    def recovery_s(self, after_ns: int, limit_s: float = START_LIMIT_S) -> float:
        """Return the seconds until the first step above the highest one that was recorded before.

        The step that is under way at ``after_ns`` does not count: ranks may still end it.

        Args:
            after_ns: a moment at which a fault was in effect, by ``time.monotonic_ns``.
            limit_s: limit of the wait for that step.

        Raises:
            AssertionError: if the step is not recorded within the limit.
        """
        recorded = self.recorded_steps()
        highest = max((step.step for step in recorded if step.at_ns <= after_ns), default=0)
        self.wait_for_step(highest + 2, limit_s)
        first_ns = next(step.at_ns for step in self.recorded_steps() if step.step >= highest + 2)
        return (first_ns - after_ns) / 1e9

    def rank_process(self, rank: int) -> psutil.Process:
        """Return the process of a rank, which runs on this machine, as soon as it exists."""
        process = wait_until(lambda: self._rank_process(rank), f"rank {rank}", poll_s=0.1)
        assert process is not None
        return process

    def _rank_process(self, rank: int) -> psutil.Process | None:
        """Return the process of a rank, or None between two attempts."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(SCRIPT) not in process.cmdline():
                    continue
                variables = process.environ()
                marks = (variables.get("TRAINING_DIRECTORY"), variables.get("RANK"))
                if marks == (str(self.directory), str(rank)):
                    return process
        return None

    def logs(self) -> str:
        """Return the last lines of the logs of all pods, for the message of a failed test."""
        texts = []
        for name in sorted(pods.pods()):
            with contextlib.suppress(OSError):
                texts.append(f"--- {name}\n" + "\n".join(pods.log(name).splitlines()[-40:]))
        return "\n".join(texts)


@contextlib.contextmanager
def training(
    kind: TrainingKind,
    *,
    name: str = "llama",
    nodes: int = 3,
    steps: int = 0,
    step_s: float = 0.05,
    step_limit_s: float = STEP_LIMIT_S,
    pod_security: PodSecurity = "privileged",
    as_root: bool = False,
    cpu_limit: str = "",
    shows_ranks: bool = True,
    cpu: str = "500m",
    unreachable_s: int | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[TrainingJob]:
    """Run a training on the tests' cluster until the context ends; it shows steps at the beginning.

    Killed containers of a StatefulSet or a Job are restarted. Those of a JobSet or a TrainJob are
    not: their controllers replace all pods, as they do in the recordings.

    Args:
        name: name of the job.
        nodes: number of its pods.
        steps: number of its last step; 0 to train without end.
        step_s: length of a step.
        step_limit_s: seconds after which a rank that has not ended its step is killed.
        pod_security: level of Pod Security that the namespace enforces.
        as_root: True for containers of root; False for those of a user without any right.
        cpu_limit: CPU limit of a container, such as ``500m``; "" for none.
        shows_ranks: True to start the ranks by torchrun. False for a single process in each pod
            whose rank is in no variable: the pods of a StatefulSet only.
        cpu: CPU that each pod requests.
        unreachable_s: seconds for which pods stay on a machine of which the control plane does not
            hear; None for those of the cluster, which are 300.
        start_limit_s: seconds until its first steps.
    """
    with contextlib.ExitStack() as undone:
        if kind in ("jobset", "trainjob"):
            undone.enter_context(controllers())
        shared = Path(tempfile.mkdtemp(prefix="training-"))
        undone.callback(shutil.rmtree, shared)
        shared.chmod(0o777)
        job = TrainingJob(kind, name, pods.namespace(), shared)
        sources = _sources(shared)
        if pod_security == "privileged":
            volumes = [
                {"name": volume, "hostPath": {"path": path}} for volume, path in sources.items()
            ]
            claims = []
        else:
            volumes = [
                {"name": volume, "persistentVolumeClaim": {"claimName": f"{name}-{volume}"}}
                for volume in sources
            ]
            claims = undone.enter_context(_persistent_volumes(name, sources))
        undone.enter_context(_enforced(pod_security))
        command = (_command if shows_ranks else _command_without_ranks)(job, nodes, steps, step_s)
        pod = _pod_spec(job, command, volumes, as_root=as_root)
        (container,) = pod["containers"]
        container["env"].append({"name": "STEP_LIMIT_S", "value": str(step_limit_s)})
        # Without a request, any other process of a busy machine has 500 times the CPU time.
        container["resources"] = {"requests": {"cpu": cpu}}
        if cpu_limit:
            container["resources"]["limits"] = {"cpu": cpu_limit}
        if unreachable_s is not None:
            pod["tolerations"] = _tolerations(unreachable_s)
        undone.enter_context(cluster.created(*claims, *_manifests(job, nodes, pod)))
        try:
            job.wait_for_step(2, start_limit_s)
        except AssertionError as error:
            error.add_note(job.logs())
            raise
        yield job


@contextlib.contextmanager
def second_training(
    job: TrainingJob, *, nodes: int, step_s: float, seed: int = 0
) -> Iterator[tuple[TrainingJob, list[dict[str, Any]]]]:
    """Yield a second job of the same training and its manifests; nothing is created.

    It has a name, a rendezvous and checkpoints of its own. Its namespace must allow paths of this
    machine in pods.

    Args:
        job: the first job.
        nodes: number of the pods.
        step_s: length of a step.
        seed: seed of the first weights; that of the first job is 0.
    """
    shared = Path(tempfile.mkdtemp(prefix="training-"))
    shared.chmod(0o777)
    second = TrainingJob(job.kind, f"{job.name}-twin", job.namespace, shared)
    volumes = [
        {"name": volume, "hostPath": {"path": path}} for volume, path in _sources(shared).items()
    ]
    pod = _pod_spec(second, _command(second, nodes, 0, step_s), volumes, as_root=False)
    pod["containers"][0]["env"] += [
        {"name": "TRAINING_SEED", "value": str(seed)},
        {"name": "STEP_LIMIT_S", "value": str(STEP_LIMIT_S)},
    ]
    try:
        yield second, [cluster.whole(manifest) for manifest in _manifests(second, nodes, pod)]
    finally:
        shutil.rmtree(shared)


def _sources(shared: Path) -> dict[str, str]:
    """Return the paths of this machine by the names of the volumes that have them.

    No container of the job mounts the hand: one that a test adds to a pod may do so.
    """
    return {
        "usr": "/usr",
        "python": sys.base_prefix,
        "environment": sys.prefix,
        "script": str(SCRIPT.parent),
        "hand": str(directory()),
        "shared": str(shared),
    }


def _first_host(job: TrainingJob) -> str:
    """Return the host name of the pod with the rendezvous, as its headless service knows it."""
    words = {"statefulset": "", "job": "", "jobset": "-workers-0", "trainjob": "-node-0"}
    return f"{job.name}{words[job.kind]}-0.{job.name}"


def _command(job: TrainingJob, nodes: int, steps: int, step_s: float) -> list[str]:
    """Return the command of a pod. torchrun becomes its first process."""
    settings = ",".join(f"{key}={value}" for key, value in _RENDEZVOUS.items())
    torchrun = (
        f"{Path(sys.prefix) / 'bin' / 'torchrun'} --nnodes={nodes} --nproc-per-node=1"
        f" --rdzv-backend=c10d --rdzv-endpoint={_first_host(job)}:{RENDEZVOUS_PORT}"
        f" --rdzv-id={job.name} --rdzv-conf=is_host=$is_host,{settings}"
        f" --max-restarts=100 {SCRIPT} {SHARED} {step_s} {steps}"
    )
    # torchrun would ask the DNS, which may not know this pod yet.
    is_host = "case $HOSTNAME in *-0) is_host=true;; *) is_host=false;; esac"
    return ["/bin/sh", "-c", f"{is_host}; exec {torchrun}"]


def _command_without_ranks(job: TrainingJob, nodes: int, steps: int, step_s: float) -> list[str]:
    """Return the command of a pod whose first process trains, with its rank as an argument."""
    python, host = Path(sys.prefix) / "bin" / "python", f"{_first_host(job)}:{RENDEZVOUS_PORT}"
    arguments = f"{SHARED} {step_s} {steps} ${{HOSTNAME##*-}} {nodes} {host}"
    return ["/bin/sh", "-c", f"exec {python} -u {SCRIPT} {arguments}"]


def _pod_spec(
    job: TrainingJob,
    command: Sequence[str],
    volumes: Sequence[Mapping[str, Any]],
    *,
    as_root: bool,
) -> dict[str, Any]:
    """Return the specification of the pods."""
    variables = _ENVIRONMENT | {"TRAINING_DIRECTORY": str(job.directory)}
    mounts = [
        {"name": volume, "mountPath": path, "readOnly": True}
        for volume, path in _sources(job.directory).items()
        if volume not in ("hand", "shared")
    ]
    container = {
        "name": "node" if job.kind == "trainjob" else "trainer",
        "image": pods.IMAGE,
        "command": command,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "securityContext": {"runAsUser": 0, "runAsGroup": 0} if as_root else RESTRICTED,
        "volumeMounts": [
            *mounts,
            {"name": "shared", "mountPath": SHARED},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(job)},
    }
    policies = {"statefulset": "Always", "job": "OnFailure"}
    return {
        "restartPolicy": policies.get(job.kind, "Never"),
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
        "topologySpreadConstraints": [spread],
    }


def _tolerations(seconds: int) -> list[dict[str, Any]]:
    """Return for how long pods stay on a machine that is not ready."""
    keys = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    common = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    return [{"key": key, **common} for key in keys]


def _labels(job: TrainingJob) -> dict[str, str]:
    """Return the labels of the pods."""
    return {"app": job.name}


def _manifests(job: TrainingJob, nodes: int, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a job. Controllers make the service of a JobSet or a TrainJob."""
    template = {"metadata": {"labels": _labels(job)}, "spec": pod}
    indexed = {
        "backoffLimit": _MANY if job.kind == "job" else 0,
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "template": template,
    }
    match job.kind:
        case "statefulset":
            spec = {
                "serviceName": job.name,
                "replicas": nodes,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": _labels(job)},
                "template": template,
            }
            return [_service(job), _object("StatefulSet", job.name, spec)]
        case "job":
            pod_with_name = {**template, "spec": {**pod, "subdomain": job.name}}
            return [
                _service(job),
                _object("Job", job.name, {**indexed, "template": pod_with_name}),
            ]
        case "jobset":
            workers = {"name": "workers", "replicas": 1, "template": {"spec": indexed}}
            return [defaulted(_object("JobSet", job.name, _jobset_spec(workers)))]
        case "trainjob":
            return _trainjob(job, nodes, indexed)


def _service(job: TrainingJob) -> dict[str, Any]:
    """Return the headless service, by which pods find each other before they are ready."""
    spec = {"clusterIP": "None", "selector": _labels(job), "publishNotReadyAddresses": True}
    return _object("Service", job.name, spec)


def _trainjob(job: TrainingJob, nodes: int, indexed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a TrainJob and its runtime before it."""
    template = {"metadata": {"labels": _TRAINER}, "spec": indexed}
    runtime = {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 1}},
        "template": {"spec": _jobset_spec({"name": "node", "template": template})},
    }
    (container,) = indexed["template"]["spec"]["containers"]
    spec = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": f"{job.name}-runtime"},
        "trainer": {"numNodes": nodes, "command": container["command"]},
    }
    return [
        _object("TrainingRuntime", f"{job.name}-runtime", runtime),
        _object("TrainJob", job.name, spec),
    ]


def _jobset_spec(replicated_job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a JobSet that may restart many times."""
    return {"failurePolicy": {"maxRestarts": _MANY}, "replicatedJobs": [replicated_job]}


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of an object."""
    return {"kind": kind, "metadata": {"name": name}, "spec": spec}


@contextlib.contextmanager
def _enforced(level: PodSecurity) -> Iterator[None]:
    """Let the namespace enforce a level of Pod Security until the context ends."""
    path = f"/api/v1/namespaces/{pods.namespace()}"
    pods.ask("PATCH", path, {"metadata": {"labels": {_SECURITY_LABEL: level}}})
    try:
        yield
    finally:
        pods.ask("PATCH", path, {"metadata": {"labels": {_SECURITY_LABEL: None}}})


@contextlib.contextmanager
def _persistent_volumes(name: str, sources: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Create volumes with paths of this machine, and yield the manifests of their claims.

    Levels of Pod Security above ``privileged`` refuse paths of the machine in pods. They allow
    claims, whatever the volume is.
    """
    path = "/api/v1/persistentvolumes"
    storage = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    claims = []
    with contextlib.ExitStack() as undone:
        for volume, source in sources.items():
            claim = f"{name}-{volume}"
            volume_name = f"{pods.namespace()}-{claim}"
            spec = {
                **storage,
                "capacity": size,
                "hostPath": {"path": source},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": pods.namespace(), "name": claim},
            }
            pods.ask("POST", path, {"metadata": {"name": volume_name}, "spec": spec})
            undone.callback(_delete_volume, f"{path}/{volume_name}")
            claims.append(
                _object(
                    "PersistentVolumeClaim",
                    claim,
                    {**storage, "resources": {"requests": size}, "volumeName": volume_name},
                )
            )
        yield claims


def _delete_volume(path: str) -> None:
    """Delete a volume, and wait for its end: its claim must end first."""
    pods.ask("DELETE", path)
    wait_until(lambda: not _exists(path), f"the end of {path}", poll_s=0.05)


def _exists(path: str) -> bool:
    """Return whether an object exists."""
    try:
        pods.ask("GET", path)
    except OSError as error:
        if cluster.status_of(error) == cluster.NOT_FOUND:
            return False
        raise
    return True
