"""Tests of the file with the second job of a twin, which is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from chaoskit import LogPatterns
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.run.attach import attach
from chaoskit.attach.twin.manifests import check_beside, read_manifests
from chaoskit.errors import BadInput
from chaoskit.faults import Kill

JOB = parse_reference("statefulset/llama")


def manifest(kind: str, name: str, api_version: str = "v1", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **fields}


def stateful_set(name: str = "llama-twin", **spec: Any) -> dict[str, Any]:
    return manifest("StatefulSet", name, "apps/v1", spec={"serviceName": name, **spec})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "twin.yaml"


def test_a_job_with_a_service_and_a_config_map(file: Path) -> None:
    objects = [manifest("Service", "llama-twin"), manifest("ConfigMap", "a"), stateful_set()]
    file.write_text(yaml.safe_dump_all(objects))
    twin = read_manifests(file)
    assert str(twin.job) == "statefulset/llama-twin"
    assert list(twin.objects) == objects
    check_beside(twin, JOB, "ml")


@pytest.mark.parametrize(
    ("api_version", "kind", "reference"),
    [
        ("batch/v1", "Job", "job/twin"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet", "jobset/twin"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjob/twin"),
    ],
)
def test_kinds_of_jobs(file: Path, api_version: str, kind: str, reference: str) -> None:
    file.write_text(yaml.safe_dump(manifest(kind, "twin", api_version, spec={})))
    assert str(read_manifests(file).job) == reference


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("kind: [", "mend it"),
        ("", "write the manifest of one job"),
        ("just a text", "a document is a str"),
        ("- kind: Pod", "a document is a list"),
        ("apiVersion: v1\nmetadata: {name: a}", "a document has no kind"),
        ("apiVersion: v1\nkind: Pod", "of kind Pod has no metadata.name"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: 3}", "has no metadata.name"),
        ("kind: Pod\nmetadata: {name: a}", "has no apiVersion"),
        (yaml.safe_dump(manifest("Service", "a")), "it has none"),
        (
            yaml.safe_dump(manifest("Job", "a", "batch.volcano.sh/v1alpha1", spec={})),
            "it has none",
        ),
        (
            yaml.safe_dump_all([stateful_set("a"), stateful_set("b")]),
            "it has StatefulSet a, StatefulSet b",
        ),
        (yaml.safe_dump(manifest("StatefulSet", "a", "apps/v1")), "write the spec"),
        (yaml.safe_dump(manifest("Job", "a", "batch/v1", spec={"suspend": True})), "suspend"),
        (
            yaml.safe_dump(stateful_set(volumeClaimTemplates=[{"metadata": {"name": "data"}}])),
            "persistentVolumeClaimRetentionPolicy.whenDeleted to Delete",
        ),
    ],
)
def test_files_that_hold_no_second_job(file: Path, text: str, remedy: str) -> None:
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        read_manifests(file)
    assert refused.value.field == "twin"
    assert refused.value.value == str(file)
    assert remedy in refused.value.remedy


def test_a_file_that_does_not_exist(file: Path) -> None:
    with pytest.raises(BadInput, match="name a file that can be read") as refused:
        read_manifests(file)
    assert refused.value.field == "twin"


def test_claims_that_end_with_their_stateful_set(file: Path) -> None:
    policy = {"whenDeleted": "Delete"}
    claims = {"volumeClaimTemplates": [{}], "persistentVolumeClaimRetentionPolicy": policy}
    file.write_text(yaml.safe_dump(stateful_set(**claims)))
    assert read_manifests(file).job.name == "llama-twin"


@pytest.mark.parametrize(
    ("name", "namespace", "remedy"),
    [
        ("llama", None, "give the second job another name: statefulset/llama is the job that runs"),
        ("llama-twin", "other", "write the namespace ml, or none"),
    ],
)
def test_jobs_that_cannot_be_beside_the_other(
    file: Path, name: str, namespace: str | None, remedy: str
) -> None:
    job = stateful_set(name)
    if namespace:
        job["metadata"]["namespace"] = namespace
    file.write_text(yaml.safe_dump(job))
    with pytest.raises(BadInput) as refused:
        check_beside(read_manifests(file), JOB, "ml")
    assert refused.value.field == "twin"
    assert remedy in refused.value.remedy


def test_the_namespace_of_the_job_may_be_named(file: Path) -> None:
    job = stateful_set()
    job["metadata"]["namespace"] = "ml"
    file.write_text(yaml.safe_dump(job))
    check_beside(read_manifests(file), JOB, "ml")


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"watch": LogPatterns(step=r"step (\d+)")}, "watch", "add the pattern of a loss"),
        ({"twin": "no-such-file.yaml"}, "twin", "name a file that can be read"),
        ({"twin_deadline_s": 0.0}, "twin_deadline_s", "use a number of seconds above 0"),
        ({"twin_steps": -1}, "twin_steps", "use a whole number, 0 or more"),
        ({"twin_step": 1}, "twin_step", "write twin_steps"),
    ],
)
def test_arguments_are_refused_before_the_cluster_is_asked(
    file: Path, settings: dict[str, Any], field: str, remedy: str
) -> None:
    file.write_text(yaml.safe_dump(stateful_set()))
    watch = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.]+)")
    arguments: dict[str, Any] = {"watch": watch, "twin": file, **settings}
    with pytest.raises(BadInput, match=remedy) as refused:
        attach("statefulset/llama", faults=[Kill(rank=1, after_s=1.0)], image="hand:1", **arguments)
    assert refused.value.field == field
