"""Write the files of ``deploy/``: ``python docs/generate/deploy.py``.

The files hold the output of ``chaoskit cluster manifests``: one file for kustomize, several
templates for Helm. The templates use only ``{{ .Values.x }}`` and one ``if`` around a whole file,
so that a test can render them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from chaoskit.journal.writer import own_version
from chaoskit.substrate.kubernetes.installation import (
    attach_roles,
    installation,
    machine_rights,
)
from chaoskit.substrate.kubernetes.nights import NightlyJob, nightly_job
from chaoskit.substrate.kubernetes.pods.manifests import Manifest

DEPLOY = Path(__file__).parents[2] / "deploy"
_GENERATED = "# Written by docs/generate/deploy.py.\n"
#: Values of the chart, with what each is for.
VALUES = {
    "namespace": (
        "chaos",
        "In which runs take place. It is made, with the label that allows them.",
    ),
    "createNamespace": (
        True,
        "Whether it is made: an existing one needs the label chaoskit.dev/chaos=allowed.",
    ),
    "podSecurity": (
        "restricted",
        "The level of Pod Security that it enforces: restricted, baseline or privileged.",
    ),
    "machines": (
        False,
        "Whether there is a role of the cluster for people that break machines (LoseMachine).",
    ),
    "attach": (
        False,
        "Whether there are roles for people that break jobs of the namespace that run already.",
    ),
    "nightly": (
        False,
        "Whether there is a CronJob of chaoskit nightly run; the values below are of it.",
    ),
    "nightlyImage": ("", "Its image, with the repository of the tests in its working directory."),
    "nightlyPlan": ("nightly.yaml", "The plan of the night, below that directory."),
    "nightlyClaim": (
        "chaoskit-nightly",
        "A PersistentVolumeClaim of the namespace, at /nights; it is not made.",
    ),
    "nightlySchedule": ("0 1 * * *", "When it begins, as cron has it."),
    "nightlyZone": ("Etc/UTC", "The time zone of that."),
}


def files() -> Mapping[str, str]:
    """Return every file, by its path below ``deploy/``."""
    namespace, *others = installation("{{ .Values.namespace }}", "{{ .Values.podSecurity }}")
    chart = {
        "apiVersion": "v2",
        "name": "chaoskit",
        "type": "application",
        "version": own_version(),
    }
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {
        "base/kustomization.yaml": _GENERATED
        + _yaml([kustomization | {"resources": ["chaoskit.yaml"]}]),
        "base/chaoskit.yaml": _GENERATED + _yaml(installation("chaos", "restricted")),
        "attach/kustomization.yaml": _GENERATED
        + _yaml([kustomization | {"resources": ["roles.yaml"]}]),
        "attach/roles.yaml": _GENERATED + _yaml(attach_roles("default")),
        "chart/Chart.yaml": _GENERATED
        + _yaml(
            [
                chart
                | {
                    "appVersion": own_version(),
                    "description": "What chaoskit's runs need on a cluster",
                }
            ]
        ),
        "chart/values.yaml": _GENERATED + "".join(_value(name) for name in VALUES),
        "chart/templates/namespace.yaml": _only_if("createNamespace", _yaml([namespace])),
        "chart/templates/chaoskit.yaml": _GENERATED + _yaml(others),
        "chart/templates/nightly.yaml": _only_if(
            "nightly", _yaml(nightly_job("{{ .Values.namespace }}", _chosen()))
        ),
        "chart/templates/attach.yaml": _only_if(
            "attach", _yaml(attach_roles("{{ .Values.namespace }}"))
        ),
        "chart/templates/machines.yaml": _only_if("machines", _yaml([machine_rights()])),
    }


def _chosen() -> NightlyJob:
    fields = ("image", "plan", "claim", "schedule", "zone")
    return NightlyJob(**{name: f"{{{{ .Values.nightly{name.capitalize()} }}}}" for name in fields})


def _yaml(documents: Iterable[Manifest]) -> str:
    return "---\n".join(msgspec.yaml.encode(document).decode() for document in documents)


def _value(name: str) -> str:
    default, comment = VALUES[name]
    return f"# {comment}\n{name}: {msgspec.json.encode(default).decode()}\n"


def _only_if(value: str, text: str) -> str:
    return f"{{{{ if .Values.{value} }}}}\n{_GENERATED}{text}{{{{ end }}}}\n"


if __name__ == "__main__":
    for name, text in files().items():
        path = DEPLOY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
