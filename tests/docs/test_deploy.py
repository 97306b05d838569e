"""The files of ``deploy/`` are as generated, and render to the output of
``chaoskit cluster manifests``.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit.attach.jobs.find import object_kinds
from chaoskit.attach.jobs.kinds import KINDS
from chaoskit.cli.app import run
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.installation import (
    attach_roles,
    installation,
    machine_rights,
)
from chaoskit.substrate.kubernetes.nights import NightlyJob, nightly_job

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_IF = re.compile(r"{{ if \.Values\.(\w+) }}\n(.*){{ end }}\n", re.DOTALL)
_VALUE = re.compile(r"{{ \.Values\.(\w+) }}")


def documents(text: str) -> list[Any]:
    return [msgspec.yaml.decode(document) for document in text.split("---\n") if document.strip()]


def rendered(**given: Any) -> list[Any]:
    """Return Helm's rendering of the chart, limited to what the chart uses: values, and an ``if``
    around a whole file.
    """
    values = msgspec.yaml.decode((DEPLOY / "chart" / "values.yaml").read_bytes()) | given
    manifests = list[Any]()
    for path in sorted((DEPLOY / "chart" / "templates").iterdir()):
        text = path.read_text()
        if condition := _IF.fullmatch(text):
            text = condition[2] if values[condition[1]] else ""
        text = _VALUE.sub(lambda match: str(values[match[1]]), text)
        assert "{{" not in text, path
        manifests += documents(text)
    return manifests


def has_same_objects(left: list[Any], right: list[Any]) -> bool:
    """Return whether both lists have the same objects, in any order."""
    return sorted(map(msgspec.json.encode, left)) == sorted(map(msgspec.json.encode, right))


def test_the_files_are_as_they_are_generated() -> None:
    files: Mapping[str, str] = runpy.run_path(str(ROOT / "docs" / "generate" / "deploy.py"))[
        "files"
    ]()
    for name, text in files.items():
        assert (DEPLOY / name).read_text() == text, "run python docs/generate/deploy.py"
    there = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*.yaml")}
    assert there == set(files)


def test_the_base_is_what_the_command_prints() -> None:
    (kustomization,) = documents((DEPLOY / "base" / "kustomization.yaml").read_text())
    (resource,) = kustomization["resources"]
    assert has_same_objects(
        documents((DEPLOY / "base" / resource).read_text()), installation("chaos", "restricted")
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, installation("chaos", "restricted")),
        ({"namespace": "a-b", "podSecurity": "baseline"}, installation("a-b", "baseline")),
        ({"createNamespace": False}, installation("chaos", "restricted")[1:]),
        ({"attach": True}, [*installation("chaos", "restricted"), *attach_roles("chaos")]),
        ({"machines": True}, [*installation("chaos", "restricted"), machine_rights()]),
        (
            {
                "nightly": True,
                "nightlyImage": "registry/train:1",
                "nightlySchedule": "30 2 * * 1-5",
            },
            [
                *installation("chaos", "restricted"),
                *nightly_job("chaos", NightlyJob("registry/train:1", schedule="30 2 * * 1-5")),
            ],
        ),
    ],
)
def test_the_chart_is_what_the_command_prints(given: dict[str, Any], wanted: list[Any]) -> None:
    assert has_same_objects(rendered(**given), wanted)


def test_each_right_has_its_reason() -> None:
    for made, granted in (
        (machine_rights(), rights.MACHINE_RIGHTS),
        (installation("chaos", "restricted")[2], rights.DRIVER_RIGHTS + rights.EVENT_RIGHTS),
        (installation("chaos", "restricted")[4], rights.CLIENT_RIGHTS + rights.ADVISORY_RIGHTS),
        (nightly_job("chaos", NightlyJob(""))[1], rights.NIGHT_RIGHTS),
    ):
        assert "; ".join(made["metadata"]["annotations"].values()) == "; ".join(
            right.why for right in granted
        )


def test_the_roles_of_attach_are_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["cluster", "manifests", "--attach", "--namespace", "ml"]) == 0
    assert documents(capsys.readouterr().out) == attach_roles("ml")
    (kustomization,) = documents((DEPLOY / "attach" / "kustomization.yaml").read_text())
    (resource,) = kustomization["resources"]
    assert documents((DEPLOY / "attach" / resource).read_text()) == attach_roles("default")


def test_the_role_of_attach_has_exactly_the_rights_that_are_checked() -> None:
    """Each right is asked for by the code that finds, follows and breaks jobs, and none is missing."""
    job_kinds = [object_kinds(kind) for kind in KINDS.values()]
    checked = {right for kinds in filter(None, job_kinds) for right in rights.of_attach(kinds)}
    checked |= {*rights.LOG_RIGHTS, *rights.HAND_RIGHTS}
    assert {*rights.of_attach_role()} >= checked
    assert set(job_kinds) - {()} == set(rights.ATTACH_KINDS)
    further = {right for listed in rights.ATTACH_LISTS for right in listed}
    assert {*rights.of_attach_role()} == checked | further


def test_the_roles_of_attach_have_a_rule_for_each_reason() -> None:
    granted = (
        rights.of_attach_role(),
        rights.ATTACH_NODE_RIGHTS,
        rights.EXEC_RIGHTS,
        rights.TWIN_RIGHTS,
    )
    for made, listed in zip(attach_roles("ml"), granted, strict=True):
        assert made["rules"] == [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
            for right in listed
        ]
        for right in listed:
            key = f"chaoskit.dev/{right.resource.replace('/', '.')}"
            assert right.why in made["metadata"]["annotations"][key].split("; ")
    assert [made["kind"] for made in attach_roles("ml")] == [
        "Role",
        "ClusterRole",
        "Role",
        "Role",
    ]
