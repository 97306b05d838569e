"""References to jobs, such as ``statefulset/llama`` or ``pods/app=llama``.

-> ``kinds.py``: the kinds. ``find.py`` looks the job up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from chaoskit.attach.jobs.kinds import KINDS, PODS, JobKind
from chaoskit.errors import BadInput, name_remedy

_FIELD = "job"
#: Names of objects are subdomains of RFC 1123, of 253 characters at most.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = re.compile(
    r"(?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?"  # key
    r"={1,2}([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?"  # value, which may be empty
)
_EXAMPLES = ", ".join(f"{word}/NAME" for word in KINDS if word != PODS.word)


@dataclass(frozen=True, slots=True)
class JobReference:
    """A reference to a job.

    Attributes:
        kind: kind of the job.
        name: name of its object; "" for pods that a selector names.
        selector: label selector of the pods; "" if an object is named.
    """

    kind: JobKind
    name: str = ""
    selector: str = ""

    def __str__(self) -> str:
        return f"{self.kind.word}/{self.name or self.selector}"


def parse_reference(text: str) -> JobReference:
    """Return the reference that a text holds.

    Raises:
        BadInput: if the kind does not exist, or the name or selector is malformed.
    """
    word, slash, rest = text.partition("/")
    if not slash or not rest:
        raise BadInput(_FIELD, text, f"write {_EXAMPLES} or pods/LABEL=VALUE")
    kind = KINDS.get(word.lower())
    if kind is None:
        raise BadInput(_FIELD, text, f"{name_remedy(word, KINDS)} before the slash")
    if kind is PODS:
        labels = [label.strip() for label in rest.split(",")]
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise BadInput(
                _FIELD, text, "write pods/LABEL=VALUE, with commas between several labels"
            )
        return JobReference(kind, selector=",".join(labels))
    if not _NAME.fullmatch(rest):
        raise BadInput(_FIELD, text, f"write the name of an object, as in {word.lower()}/llama")
    return JobReference(kind, name=rest)
