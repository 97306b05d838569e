"""The file that holds the manifests of a second job, the twin of a running job, and its checks.

-> attach/twin/objects.py: the checks that the API server answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.attach.jobs.kinds import KINDS, PODS, STATEFULSET, JobKind
from chaoskit.attach.jobs.reference import JobReference
from chaoskit.errors import BadInput
from chaoskit.settings_file import read_documents
from chaoskit.substrate.kubernetes.api.rights import JOB_RESOURCES

FIELD = "twin"
_JOB_KINDS = {kind.kind: kind for kind in KINDS.values() if kind is not PODS}

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TwinManifests:
    """The manifests of a second job.

    Attributes:
        file: the file that holds them.
        objects: the manifests, in the order of their creation.
        job: the reference to the second job.
    """

    file: str
    objects: tuple[Manifest, ...]
    job: JobReference


def read_manifests(file: Path) -> TwinManifests:
    """Return the manifests of a file.

    Raises:
        BadInput: if it cannot be read, holds something else than manifests of named objects, or not
            exactly one job.
    """
    documents = read_documents(FIELD, file)
    for document in documents:
        if problem := _why_no_manifest(document):
            raise BadInput(FIELD, str(file), problem)
    jobs = [(kind, document) for document in documents if (kind := _job_kind(document))]
    if len(jobs) != 1:
        kinds = ", ".join(_JOB_KINDS)
        named = ", ".join(f"{kind.kind} {_name(manifest)}" for kind, manifest in jobs) or "none"
        raise BadInput(
            FIELD, str(file), f"write the manifest of one job ({kinds}) in it: it has {named}"
        )
    kind, manifest = jobs[0]
    if problem := _why_no_twin(kind, manifest):
        raise BadInput(FIELD, str(file), problem)
    job = JobReference(kind, name=_name(manifest))
    return TwinManifests(str(file), tuple(documents), job)


def check_beside(twin: TwinManifests, job: JobReference, namespace: str) -> None:
    """Refuse manifests that cannot exist beside a job.

    Args:
        twin: the manifests.
        job: the job that runs.
        namespace: its namespace.

    Raises:
        BadInput: if the second job has the name of the job, or an object another namespace.
    """
    if twin.job.name == job.name:
        remedy = f"give the second job another name: {job} is the job that runs"
        raise BadInput(FIELD, twin.file, remedy)
    for manifest in twin.objects:
        named = manifest["metadata"].get("namespace") or namespace
        if named != namespace:
            remedy = (
                f"write the namespace {namespace}, or none: that of {describe(manifest)} is {named}"
            )
            raise BadInput(FIELD, twin.file, remedy)


def describe(manifest: Manifest) -> str:
    """Return kind and name of an object, for messages."""
    return f"{manifest['kind']} {_name(manifest)}"


def _why_no_manifest(document: Any) -> str:
    """Return why a document is no manifest of a named object, with the remedy; "" if it is one."""
    remedy = "write manifests with apiVersion, kind and metadata.name in it"
    if not isinstance(document, dict):
        return f"{remedy}: a document is a {type(document).__name__}"
    metadata = document.get("metadata")
    fields = {
        "apiVersion": document.get("apiVersion"),
        "kind": document.get("kind"),
        "metadata.name": metadata.get("name") if isinstance(metadata, dict) else None,
    }
    missing = [name for name, text in fields.items() if not isinstance(text, str) or not text]
    kind = f" of kind {fields['kind']}" if "kind" not in missing else ""
    return f"{remedy}: a document{kind} has no {missing[0]}" if missing else ""


def _job_kind(manifest: Manifest) -> JobKind | None:
    """Return the kind of the job that a manifest is of; None for another object."""
    kind = _JOB_KINDS.get(manifest["kind"])
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return kind if kind is not None and JOB_RESOURCES[kind.kind][1] == group else None


def _why_no_twin(kind: JobKind, manifest: Manifest) -> str:
    """Return why a job does not begin at once and from its begin, with the remedy; "" if it does."""
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        return f"write the spec of {describe(manifest)}"
    if spec.get("suspend"):
        return f"leave spec.suspend of {describe(manifest)} out: no training would run"
    policy = spec.get("persistentVolumeClaimRetentionPolicy") or {}
    if (
        kind is STATEFULSET
        and spec.get("volumeClaimTemplates")
        and policy.get("whenDeleted") != "Delete"
    ):
        remedy = "set spec.persistentVolumeClaimRetentionPolicy.whenDeleted to Delete"
        return f"{remedy}: else the claims of {describe(manifest)} stay, and the next twin goes on from them"
    return ""


def _name(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])
