"""What users choose of the pods in which their runs take place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from chaoskit.errors import BadInput, closest_name

#: Of a pod that may ask the API server.
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Environment variables begin with it, and go on with the name of an option in capitals.
VARIABLE = "CHAOSKIT_KUBERNETES_"


def in_a_pod() -> bool:
    """Whether this process is in a pod that may ask the API server."""
    return Path(SERVICE_ACCOUNT).is_dir()


class DrivenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client has made before it starts a driver. ``directory``: in which that finds it, as files."""

    name: str
    directory: str

    def read(self, name: str) -> str:
        """The ``token`` of the session's pods, or the ``owner``: the UID of its Job."""
        return (Path(self.directory) / name).read_text(encoding="utf-8").strip()


def _remedy_of(name: str, options: Iterable[str]) -> str:
    """Return the remedy for a variable that names no option."""
    variables = [f"{VARIABLE}{option.upper()}" for option in options if option != "session"]
    by_option = {variable.removeprefix(VARIABLE): variable for variable in variables}
    if closest := closest_name(name, by_option):
        return f"write {by_option[closest]}"
    return f"unset it, or use one of {', '.join(variables)}"


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where pods are made, and of what.

    Attributes:
        image: with Python, torch and this version of chaoskit; for a driver of chaoskit[kubernetes].
        python: the command that runs Python in it.
        template: file with a Pod, or an object with the template of one, such as a Deployment. It is merged over
            chaoskit's pods: where both set a field, the template wins. "" for none.
        context: of the kubeconfig; "" for its current one, or the service account of the pod in which chaoskit runs.
        namespace: in which pods are made; "" for that of the context.
        harness: where runs are driven from. ``pod``: a pod of its own, the driver. ``here``: this process, which pods
            must reach. "" for a pod, unless this process is in one.
        service_account: under which a driver makes pods; "" for one of the session's own, with a role.
        address: under which pods reach this process, where it drives runs; "" for its address on the way to the API
            server.
        startup_s: pods must run within this time.
        machines: of the cluster that faults may break, separated by commas. Pods of nodes go there; the driver's and
            the coordinator's rather do not. "" for none.
        levers: file with commands that break them; see :mod:`chaoskit.substrate.kubernetes.machines.machine_commands`.
            "" for none.
        strangers: whether a machine may be broken on which others' pods run.
        network_faults: whether pods have a helper that may change their network: a container of root's with NET_ADMIN
            and NET_RAW, which the namespace must let in.
        own_machine: on which this process runs, where it is in a pod itself; it is not broken. A driver finds it.
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
    own_machine: str = ""
    session: str = ""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Self:
        """What ``CHAOSKIT_KUBERNETES_IMAGE`` and its like say.

        Raises:
            BadInput: if a variable names no option, or its value cannot be one.
        """
        given = {name: value for name, value in variables.items() if name.startswith(VARIABLE)}
        fields = {field.name: field.type for field in msgspec.structs.fields(cls)}
        told: dict[str, Any] = {}
        for variable, value in given.items():
            name = variable.removeprefix(VARIABLE).lower()
            if name not in fields:
                raise BadInput(variable, value, _remedy_of(name, fields))
            try:
                told[name] = msgspec.convert(value, fields[name], strict=False)
            except msgspec.ValidationError as error:
                raise BadInput(variable, value, f"give another value: {error}") from None
        return cls(**told)

    def for_driver(self, session: str, directory: str) -> dict[str, str]:
        """Variables that give a driver the same, and the session that it belongs to."""
        driven = msgspec.json.encode(DrivenSession(session, directory)).decode()
        told = {"image": self.image, "python": self.python, "startup_s": str(self.startup_s)}
        told |= {"machines": self.machines, "network_faults": self.network_faults}
        told |= {
            "harness": "here",
            "session": driven,
            "template": f"{directory}/template" if self.template else "",
        }
        return {f"{VARIABLE}{name.upper()}": value for name, value in told.items() if value}

    @property
    def driven(self) -> DrivenSession | None:
        """The session of which this process is the driver."""
        return msgspec.json.decode(self.session, type=DrivenSession) if self.session else None

    @property
    def breakable(self) -> tuple[str, ...]:
        """The machines that faults may break."""
        return tuple(name.strip() for name in self.machines.split(",") if name.strip())

    @property
    def has_driver(self) -> bool:
        """Whether runs are driven by a pod of its own."""
        return self.harness == "pod" or (not self.harness and not in_a_pod())

    def unavailable(self) -> str:
        """Why no pod can be made with them here; "" if nothing is known against it."""
        if find_spec("kubernetes") is None:
            return "there is no client: install chaoskit[kubernetes]"
        if not self.image and not self.template:
            return f"name an image with Python, torch and chaoskit: {VARIABLE}IMAGE=..., or {VARIABLE}TEMPLATE=FILE"
        return ""

    def require(self) -> None:
        """Refuse what no pod can be made with. Raises BadInput."""
        if reason := self.unavailable():
            raise BadInput("substrate", "kubernetes", reason)
        if self.template and not Path(self.template).is_file():
            raise BadInput("template", self.template, "name a file with a Pod in YAML or JSON")
        if self.levers and not Path(self.levers).is_file():
            raise BadInput(
                "levers",
                self.levers,
                "name a file with commands that break machines, and what undoes them",
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
