"""The ephemeral container of a hand: its manifest, its user, and why it does not run.

These functions make no requests.

-> attach/hands/start.py creates it. ``docs/architecture/hand.md``: the program in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Manifest = dict[str, Any]
HandRole = Literal["processes", "network"]

PROCESSES: HandRole = "processes"
NETWORK: HandRole = "network"
HAND_ROLES: tuple[HandRole, ...] = (PROCESSES, NETWORK)
#: Prefix of the names of these containers. A name is never used again while its pod exists.
PREFIX = "chaoskit-hand-"
_COMMAND = ("python3", "-m", "hand")
#: Reasons of the kubelet for an image that it could not pull.
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
#: A user without a name and without rights, for a hand that is to report the user of its target.
UNPRIVILEGED_UID = 65534


class TargetUser(NamedTuple):
    """The user and the group of the processes of a container."""

    uid: int
    gid: int


class HandImage(NamedTuple):
    """The image of hands, and how a container of it is started.

    Attributes:
        name: name of the image; its command is replaced.
        command: the command that starts a hand, without the options of its role.
        working_directory: directory in which it is started; "" for that of the image.
        mounts: volume mounts of the container; volumes of the pod only.
    """

    name: str
    command: tuple[str, ...] = _COMMAND
    working_directory: str = ""
    mounts: tuple[Mapping[str, Any], ...] = ()


class ContainerExec(NamedTuple):
    """The start of a hand on processes by exec in the container of its target.

    Attributes:
        python: the interpreter in that container.
    """

    python: str = "python3"


#: The start of a hand on processes by exec, in words.
EXEC: Literal["exec in the container"] = "exec in the container"
#: A means by which a hand is started.
HandSource = HandImage | ContainerExec


class HandMeans(NamedTuple):
    """The means by which the hands of a run are started.

    Attributes:
        image: image of ephemeral containers; None if the user names none.
        by_exec: True to start hands on processes by exec.
    """

    image: HandImage | None = None
    by_exec: bool = False

    def source(self, role: HandRole) -> HandSource | None:
        """Return the means for hands of a role; None if there is none."""
        return ContainerExec() if self.by_exec and role == PROCESSES else self.image


def user_of(pod: Mapping[str, Any], container: str) -> TargetUser | None:
    """Return the user that a pod sets for a container; None if its image decides."""
    of_pod = pod["spec"].get("securityContext") or {}
    of_container = next(
        (
            entry.get("securityContext") or {}
            for entry in pod["spec"]["containers"]
            if entry["name"] == container
        ),
        {},
    )
    uid = of_container.get("runAsUser", of_pod.get("runAsUser"))
    gid = of_container.get("runAsGroup", of_pod.get("runAsGroup"))
    if uid is None or gid is None:  # without a group, that of the user in the image counts
        return None
    return TargetUser(uid, gid)


def needed_user(hello: Mapping[str, Any]) -> TargetUser | None:
    """Return the user of most processes that a hand may not read; None if it may read all.

    Of users with as many processes, that of the youngest process counts: the first process may be
    one of another user that only starts the others.

    Args:
        hello: the answer of a process hand to ``hello``.
    """
    users = [
        TargetUser(process["needs"]["uid"], process["needs"]["gid"])
        for process in hello.get("processes", ())
        if "needs" in process
    ]
    return max(users[::-1], key=users.count, default=None)


def refusal_of_pod(pod: Mapping[str, Any], role: HandRole) -> str:
    """Return why no hand of a role may be started in a pod; "" if one may.

    A pod that shares a namespace of its machine is refused: the hand would act on all of it. One
    whose containers share their processes is refused, too: their first process is not known.
    """
    if role == NETWORK and pod["spec"].get("hostNetwork"):
        return "the pod has the network of its machine (hostNetwork): break the machine instead"
    if role == PROCESSES and pod["spec"].get("hostPID"):
        return "the pod sees all processes of its machine (hostPID): remove hostPID from it"
    if role == PROCESSES and pod["spec"].get("shareProcessNamespace"):
        return "its containers share their processes (shareProcessNamespace): let each have its own"
    return hand_status(pod, "").problem


def hand_container(
    name: str, role: HandRole, image: HandImage, target: str, user: TargetUser
) -> Manifest:
    """Return the ephemeral container of a hand.

    A hand on processes has no capability, unless its target is root: then it has those of the
    container runtime, as the target may have. One on the network is root, and has NET_ADMIN.

    Args:
        name: name of the container.
        target: the container whose processes a hand on processes sees.
        user: the user of such a hand.
    """
    security: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if role == PROCESSES:
        security |= {
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            "runAsNonRoot": user.uid != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        if user.uid == 0:
            del security["capabilities"]  # else the kernel protects the target, which has more
    else:
        security |= {"runAsUser": 0, "runAsNonRoot": False}
        security["capabilities"] = {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    container: Manifest = {
        "name": name,
        "image": image.name,
        "command": [*image.command, f"--{role}"],
        "stdin": True,
        "stdinOnce": True,  # the hand reads the end of its input when its client is gone
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if role == PROCESSES:
        container["targetContainerName"] = target
    if image.working_directory:
        container["workingDir"] = image.working_directory
    if image.mounts:
        container["volumeMounts"] = [dict(mount) for mount in image.mounts]
    return container


class HandStatus(NamedTuple):
    """The state of the ephemeral container of a hand.

    Attributes:
        is_running: True if the program runs.
        problem: why it will not run, in words; "" if it may still start, or runs.
        waits_for: what it waits for, in words; "" if nothing is known.
    """

    is_running: bool
    problem: str = ""
    waits_for: str = ""


def hand_status(pod: Mapping[str, Any], name: str) -> HandStatus:
    """Return the state of a hand's container.

    Args:
        pod: the object of its pod.
        name: name of the container.
    """
    status = pod.get("status") or {}
    if (phase := status.get("phase")) in ("Succeeded", "Failed"):
        return HandStatus(False, f"the pod has ended ({phase}): no container starts in it")
    states = status.get("ephemeralContainerStatuses") or ()
    state = next((entry.get("state") or {} for entry in states if entry["name"] == name), {})
    if "running" in state:
        return HandStatus(True)
    if (ended := state.get("terminated")) is not None:
        return HandStatus(False, _in_words("it has ended", ended))
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in _PULL_REASONS:
        return HandStatus(False, _in_words("its image cannot be pulled", waiting))
    if waiting.get("reason") == "RunContainerError":  # not tried again by the kubelet
        return HandStatus(False, _in_words("its target does not run", waiting))
    return HandStatus(False, "", _in_words("", waiting) if waiting else "")


def _in_words(problem: str, state: Mapping[str, Any]) -> str:
    """Return a problem with the reason and the message of a container's state, on one line."""
    exit_code = f"exit code {state['exitCode']}" if "exitCode" in state else ""
    message = " ".join(str(state.get("message") or "").split())
    details = [text for text in (exit_code, str(state.get("reason") or ""), message) if text]
    return ": ".join(text for text in (problem, ", ".join(details)) if text)
