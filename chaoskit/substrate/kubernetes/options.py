"""Options for the pods in which runs take place.

-> kubernetes/examination.py checks the cluster for these options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from chaoskit.errors import BadInput, closest_name

#: Directory of the service account of a pod that may ask the API server.
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Prefix of environment variables; the name of an option follows in capitals.
VARIABLE = "CHAOSKIT_KUBERNETES_"


def in_a_pod() -> bool:
    """Return whether this process is in a pod that may ask the API server."""
    return Path(SERVICE_ACCOUNT).is_dir()


class DrivenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The session that a client has created for a driver.

    Attributes:
        name: name of the session.
        directory: directory in which the driver finds files of the session.
    """

    name: str
    directory: str

    def read(self, name: str) -> str:
        """Return the content of a file: ``token`` of the session's pods, or ``owner``.

        The latter is the UID of the session's Job. Raises OSError if there is no such file.
        """
        return (Path(self.directory) / name).read_text(encoding="utf-8").strip()


def _remedy_of(name: str, options: Iterable[str]) -> str:
    """Return the remedy for a variable that names no option."""
    variables = [f"{VARIABLE}{option.upper()}" for option in options if option != "session"]
    by_option = {variable.removeprefix(VARIABLE): variable for variable in variables}
    if closest := closest_name(name, by_option):
        return f"write {by_option[closest]}"
    return f"unset it, or use one of {', '.join(variables)}"


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for the pods of runs, and for the cluster in which they are created.

    Attributes:
        image: image with Python, torch and this version of chaoskit. For a driver it needs
            chaoskit[kubernetes].
        python: the command that runs Python in the image.
        template: file with a Pod, or an object with the template of one, such as a Deployment. It
            is merged over chaoskit's pods: where both set a field, the template wins. "" for none.
        context: context of the kubeconfig; "" for its current one, or the service account of the
            pod in which chaoskit runs.
        namespace: namespace in which pods are created; "" for that of the context.
        harness: place from which runs are driven. ``pod``: a pod of its own, the driver. ``here``:
            this process, which pods must reach. "" for a pod, unless this process is in one.
        service_account: account with which a driver creates pods; "" for an account of the
            session's own, with a role.
        address: address at which pods reach this process, if it drives runs; "" for its address on
            the way to the API server.
        startup_s: seconds within which pods must run, above 0.
        machines: machines of the cluster that faults may break, separated by commas. Pods of nodes
            are placed there; those of the driver and the coordinator preferably elsewhere. "" for
            none.
        levers: file with commands that break machines; see
            :mod:`chaoskit.substrate.kubernetes.machines.machine_commands`. "" for none.
        strangers: ``allow`` if a machine may be broken that runs pods of others.
        network_faults: ``allow`` if pods have a helper that may change their network: a container
            of root's with NET_ADMIN and NET_RAW, which the namespace must admit.
        shared: directory of a volume that the template mounts in every pod, and that all pods may
            write at once. Commands on several nodes keep their checkpoints there. "" for none.
        own_machine: machine of this process if it is in a pod itself; it is not broken. A driver
            finds it.
        session: JSON of :class:`DrivenSession`. A driver finds it; users leave it out.
    """

    image: str = ""
    python: str = "python3"
    template: str = ""
    context: str = ""
    namespace: str = ""
    harness: Literal["", "pod", "here"] = ""
    service_account: str = ""
    address: str = ""
    startup_s: float = 120.0
    machines: str = ""
    levers: str = ""
    strangers: Literal["refuse", "allow"] = "refuse"
    network_faults: Literal["refuse", "allow"] = "refuse"
    shared: str = ""
    own_machine: str = ""
    session: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Self:
        """Return the options that environment variables such as ``CHAOSKIT_KUBERNETES_IMAGE`` set.

        Raises:
            BadInput: if a variable names no option, or its value is invalid.
        """
        settings = {name: text for name, text in variables.items() if name.startswith(VARIABLE)}
        fields = {field.name: field.type for field in msgspec.structs.fields(cls)}
        options: dict[str, Any] = {}
        for variable, text in settings.items():
            name = variable.removeprefix(VARIABLE).lower()
            if name not in fields:
                raise BadInput(variable, text, _remedy_of(name, fields))
            try:
                options[name] = msgspec.convert(text, fields[name], strict=False)
            except msgspec.ValidationError as error:
                raise BadInput(variable, text, f"give another value: {error}") from None
        return cls(**options)

    def for_driver(self, session: str, directory: str) -> dict[str, str]:
        """Return the environment variables that give these options to the driver of a session.

        Options that are of use only to the client are left out.

        Args:
            session: name of the session.
            directory: directory in which the driver finds files of the session.
        """
        driven = msgspec.json.encode(DrivenSession(session, directory)).decode()
        options = {"image": self.image, "python": self.python, "startup_s": str(self.startup_s)}
        options |= {"machines": self.machines, "network_faults": self.network_faults}
        options |= {"shared": self.shared}
        options |= {
            "harness": "here",
            "session": driven,
            "template": f"{directory}/template" if self.template else "",
        }
        return {f"{VARIABLE}{name.upper()}": text for name, text in options.items() if text}

    @property
    def driven(self) -> DrivenSession | None:
        """The session of which this process is the driver, or None."""
        return msgspec.json.decode(self.session, type=DrivenSession) if self.session else None

    @property
    def breakable(self) -> tuple[str, ...]:
        """The names of the machines that faults may break."""
        return tuple(name.strip() for name in self.machines.split(",") if name.strip())

    @property
    def has_driver(self) -> bool:
        """True if runs are driven by a pod of their own, and not by this process."""
        return self.harness == "pod" or (not self.harness and not in_a_pod())

    def unavailable(self) -> str:
        """Return the known reason for which no pod can be created with these options, or ""."""
        if find_spec("kubernetes") is None:
            return "the Kubernetes client is missing: install chaoskit[kubernetes]"
        if not self.image and not self.template:
            return f"name an image with Python, torch and chaoskit: {VARIABLE}IMAGE=..., or {VARIABLE}TEMPLATE=FILE"
        return ""

    def require(self) -> None:
        """Raise BadInput if no pod can be created with these options, or a file is missing.

        The cluster is not asked.
        """
        if reason := self.unavailable():
            raise BadInput("substrate", "kubernetes", reason)
        if self.template and not Path(self.template).is_file():
            raise BadInput("template", self.template, "name a file with a Pod in YAML or JSON")
        if self.levers and not Path(self.levers).is_file():
            raise BadInput(
                "levers",
                self.levers,
                "name a file with commands that break machines, and the commands that undo them",
            )
        if not 0 < self.startup_s < math.inf:
            raise BadInput("startup_s", self.startup_s, "use a number of seconds above 0")
        try:
            if self.address:
                IPv4Address(self.address)
        except ValueError:
            raise BadInput(
                "address", self.address, "use an IPv4 address under which pods reach this machine"
            ) from None
