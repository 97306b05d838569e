"""The unbroken run of a second job: created after the run on the job, observed, and deleted.

So faults never strike a cluster that has two trainings to carry.

-> attach/twin/objects.py: its objects. attach/twin/progress.py: when it has shown enough.
experiment/judge/command_judge.py compares the losses.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.attach.jobs.containers import training_container
from chaoskit.attach.jobs.find import FoundJob, object_kinds
from chaoskit.attach.jobs.membership import JobMembership, PlaceKey, membership
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.pod_state import as_version
from chaoskit.attach.jobs.reference import JobReference
from chaoskit.attach.jobs.tracker import JobTracker
from chaoskit.attach.logs.files import LogFiles
from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import ContainerLine, LogHole, LogPlace
from chaoskit.attach.twin.cache import JobTwins
from chaoskit.attach.twin.manifests import TwinManifests, check_beside
from chaoskit.attach.twin.objects import TwinObject, created, require_creatable
from chaoskit.attach.twin.progress import StepGoal, TwinLog, why_failed
from chaoskit.attach.twin.sharing import check_sharing
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.run.running_job import has_ended_well
from chaoskit.experiment.twin.command_twin import CommandTwin
from chaoskit.journal import Journal
from chaoskit.stacks.patterns import LogPatterns
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.pods.state import pending
from chaoskit.substrate.undo import UndoLog

#: Directory of the logs of a second job, below that of the run that is compared with it.
FOLDER = "twin"
_LOOK_S = 1.0
#: Seconds in which the logs of a job that has ended are read to their ends.
_LAST_LINES_S = 15.0


@dataclass(frozen=True, slots=True)
class TwinPlan:
    """The plan of the unbroken run of a second job.

    Attributes:
        manifests: its manifests.
        watch: the patterns of steps and losses.
        container: name of the container that trains; "" for the one that the rules select.
        steps: number of the step up to which it trains at least.
        deadline_s: seconds after which it ends.
    """

    manifests: TwinManifests
    watch: LogPatterns
    container: str
    steps: int
    deadline_s: float


class SecondJob:
    """A second job that can be created beside a job that runs.

    Args:
        api: client of the namespace.
        job: the job that runs.
        plan: the plan.
        twins: results of earlier runs.

    Raises:
        BadInput: if it cannot be created; nothing is created.
        ApiError: if the server does not answer.
    """

    def __init__(self, api: KubernetesApi, job: FoundJob, plan: TwinPlan, twins: JobTwins) -> None:
        check_beside(plan.manifests, job.reference, job.namespace)
        self._api, self._plan, self._twins = api, plan, twins
        self._objects: Sequence[TwinObject] = require_creatable(api, plan.manifests)
        check_sharing(plan.manifests, job)  # of manifests whose form the server has checked
        parts = (api.server, job.namespace, job.reference, plan.container, plan.watch)
        self._key = repr((parts, plan.manifests.objects))

    def twin_of(
        self, run: CommandRun, undo: UndoLog, why_aborted: Callable[[], str]
    ) -> CommandTwin | None:
        """Return the unbroken run to compare a run with; None if that run did not end well.

        Args:
            run: the run on the job, which has ended.
            undo: log of the changes that must be undone if this process is killed.
            why_aborted: returns why the user wants all to end; "" while it may go on.
        """
        shown = [line for line in run.lines if line.step is not None]
        steps = [line.step for line in shown if line.step is not None]
        if not steps or not has_ended_well(run):
            return None
        last = max(steps)
        goal = StepGoal(
            min(steps), last, max(last, self._plan.steps), len({line.node for line in shown})
        )
        twin = self._twins.get(self._key, goal)
        if twin is None:
            observed = _Observed(self._api, self._plan, run.directory / FOLDER)
            twin = self._make(observed, goal, undo, why_aborted)
            self._twins.put(self._key, twin)
        return twin

    def _make(
        self, observed: _Observed, goal: StepGoal, undo: UndoLog, why_aborted: Callable[[], str]
    ) -> CommandTwin:
        """Create the second job, observe it up to its goal, delete it, and return its result."""
        failure = ""
        try:
            with created(self._api, self._plan.manifests.objects, self._objects, undo):
                failure = observed.until(goal, why_aborted)
        except HarnessError as error:  # of a request, or of the undo log
            failure = str(error)
        failure = failure or observed.log.why_unusable(goal)
        counts, losses = observed.log.shown()
        where = f"; see {observed.directory}" if failure else ""
        return CommandTwin(counts, losses, uuid.uuid4().hex, failure=failure + where)


class _Observed:
    """A second job whose pods and logs are followed.

    Attributes:
        log: the steps that it has shown.
        directory: the directory of its logs.
    """

    def __init__(self, api: KubernetesApi, plan: TwinPlan, directory: Path) -> None:
        self.log, self.directory = TwinLog(plan.watch), directory
        self._api, self._plan = api, plan
        self._pods = _TwinPods(api, plan.manifests.job, plan.container)
        self._nodes: dict[str, str] = {}  # UID of a pod -> its node
        self._files: LogFiles | None = None

    def until(self, goal: StepGoal, why_aborted: Callable[[], str]) -> str:
        """Observe it until it has shown its goal, and return why it did not, or ""."""
        journal = Journal(self.directory / "journal", "logs", role="logs")
        self._files = files = LogFiles(
            self.directory, journal, lambda place: self._nodes[place.pod_uid]
        )
        follower = LogFollower(self._api, self._receive)
        failure = ""
        try:
            failure = self._follow(follower, goal, why_aborted)
        except BadInput as error:  # a pod does not show which container trains
            failure = str(error)
        finally:
            self._files = None  # the followers end in the middle of the logs
            with contextlib.suppress(Exception):  # which is the reason below
                follower.close()
            files.close()
            journal.close("the second job is deleted")
        error_text = f"its log was not read: {follower.error!r}" if follower.error else ""
        return failure or error_text

    def _follow(self, follower: LogFollower, goal: StepGoal, why_aborted: Callable[[], str]) -> str:
        """Look at the pods again and again, as :meth:`until`."""
        end_s, ended_s = time.monotonic() + self._plan.deadline_s, None
        while not self.log.has_shown(goal, time.monotonic_ns()):
            now_s = time.monotonic()
            if reason := why_aborted():
                return f"the run was aborted: {reason}"
            if follower.error is not None:
                return ""  # it is the reason then
            if now_s >= end_s:
                return self._why_late(goal)
            for key, pod, container in self._pods.look():
                self._nodes[pod["metadata"]["uid"]] = key.node_name
                follower.follow(pod, [container], from_begin=True)
            if reason := why_failed(self._pods.places, self._pods.containers):
                return reason
            if self._pods.has_ended:
                ended_s = now_s if ended_s is None else ended_s
                is_read = all(follower.is_over(place) for place in follower.places)
                if is_read or now_s - ended_s > _LAST_LINES_S:
                    return ""
            time.sleep(_LOOK_S)
        return ""

    def _why_late(self, goal: StepGoal) -> str:
        """Return why the steps of its goal were not shown in time; "" if only later ones were not."""
        unusable = self.log.why_unusable(goal)
        late = f"it was ended after {self._plan.deadline_s:g} s (twin_deadline_s)"
        return "; ".join(filter(None, (late, unusable, self._pods.pending()))) if unusable else ""

    def _receive(self, records: Sequence[ContainerLine | LogHole]) -> None:
        """Take lines and holes of one pod."""
        if (files := self._files) is None:
            return
        files.receive(records)
        for record in records:
            self.log.receive(self._node_of(record.place), record)

    def _node_of(self, place: LogPlace) -> str:
        return self._nodes[place.pod_uid]


class _TwinPods:
    """The pods of a second job, which are listed again and again.

    Attributes:
        places: its places.
        containers: name of the container that trains, by place.
    """

    def __init__(self, api: KubernetesApi, reference: JobReference, container: str) -> None:
        self.places = JobPlaces(())
        self.containers: dict[PlaceKey, str] = {}
        self._api, self._reference, self._container = api, reference, container
        self._members: JobMembership | None = None
        self._tracker: JobTracker | None = None
        self._pods: Sequence[dict[str, Any]] = ()

    @property
    def has_ended(self) -> bool:
        """True if the training has ended by itself."""
        job = self.places.job
        return job is not None and bool(job.outcome)

    def look(self) -> list[tuple[PlaceKey, dict[str, Any], str]]:
        """Return place, object and container of each pod at present.

        A server that does not answer leaves the last state. There are no pods before their owner.

        Raises:
            BadInput: if it is not clear which container trains.
        """
        try:
            self._list()
        except ApiError:
            return []
        listed = []
        for pod in self._pods:
            placed = self._members.place_of(pod) if self._members is not None else None
            if placed is not None:
                key, _ = placed
                names = [str(entry["name"]) for entry in pod["spec"]["containers"]]
                kind = self._reference.kind
                container = training_container(
                    pod["metadata"]["name"], names, kind, self._container
                )
                self.containers[key] = container
                listed.append((key, pod, container))
        return listed

    def pending(self) -> str:
        """Return in words why a pod does not run; "" if all do."""
        reasons = (pending(f"pod {pod['metadata']['name']}", pod) for pod in self._pods)
        return next((str(reason) for reason in reasons if reason), "")

    def _list(self) -> None:
        """List the job and its pods. Raises ApiError."""
        owner_kind = object_kinds(self._reference.kind)[-1]
        jobs, version = self._api.list_all(owner_kind, name=self._reference.name)
        if not jobs:
            return
        if self._tracker is None or self._members is None:
            self._members = membership(self._reference, jobs[0])
            self._tracker = JobTracker(self._members)
        now_s = time.monotonic()
        self._tracker.list_job(jobs[0], as_version(version), now_s)
        self._pods, version = self._api.list_all("Pod", self._members.selector)
        self._tracker.list_pods(self._pods, as_version(version), now_s)
        self.places = self._tracker.places()
