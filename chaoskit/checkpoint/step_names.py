"""The step in the name that a script gives to a checkpoint. A name that could mean several steps is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.errors import BadInput

CheckpointId = str | os.PathLike[str]

_number = re.compile(r"\d+")
_step = re.compile(r"step[-_= ]?(\d+)", re.IGNORECASE)
#: The words before a number that say that it is not a step.
_OTHER = (
    *("v", "ver", "version", "run", "trial", "fold", "seed", "ema", "lr", "bs"),
    *("rank", "worker", "node", "gpu", "tp", "pp", "dp"),
    *(
        "loss",
        "acc",
        "accuracy",
        "top",
        "bleu",
        "rouge",
        "ppl",
        "perplexity",
        "wer",
        "auc",
        "map",
        "f",
        "err",
        "error",
    ),
    *("fp", "bf", "tf", "int", "uint", "float", "bfloat"),
)
_other = re.compile(rf"(?<![a-z])({'|'.join(_OTHER)})[-_= ]?$", re.IGNORECASE)
_date = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}|\d{6})?")
_sign = re.compile(r"(^|[^A-Za-z0-9])[-+.]$")
_REMEDY = (
    "write step-N with no number after it, or give SnapshotWriter(step_key=...) or writer.step = N"
)


def step_of(checkpoint_id: CheckpointId) -> int:
    """Return the step that a checkpoint is named after.

    The last part of the path counts: a snapshot's own name, a name with exactly one number, or a name with exactly one
    ``step-N`` (also ``step_N``, ``step=N``, ``step N``, ``stepN``) that no other number follows.

    Raises:
        BadInput: if there is no number, or another one may be meant.
    """
    name = Path(os.fspath(checkpoint_id)).name
    if (age := parse_name(name)) is not None:
        return age[0]
    numbers = list(_number.finditer(name))
    if not numbers:
        raise BadInput("checkpoint_id", os.fspath(checkpoint_id), "name the step, such as step-120")
    steps = list(_step.finditer(name))
    last = numbers[-1]
    is_only = len(numbers) == 1 and not _means_something_else(name, last)
    is_last = len(steps) == 1 and steps[0].end() == last.end()
    if (is_only or is_last) and not name[last.end() :][:1].isalpha():
        return int(last[0])
    raise BadInput("checkpoint_id", os.fspath(checkpoint_id), f"{_REMEDY}: {_candidates(numbers)}")


def names_step(checkpoint_id: CheckpointId) -> bool:
    """Return whether :func:`step_of` finds a step."""
    try:
        step_of(checkpoint_id)
    except BadInput:
        return False
    return True


def _means_something_else(name: str, number: re.Match[str]) -> bool:
    """Return whether a number is labelled as another thing than a step, has a sign, or is a date."""
    before = name[: number.start()]
    is_date = _date.fullmatch(number[0]) is not None and _step.search(name) is None
    return is_date or _other.search(before) is not None or _sign.search(before) is not None


def _candidates(numbers: list[re.Match[str]]) -> str:
    *rest, last = [number[0] for number in numbers]
    return f"its numbers are {', '.join(rest)} and {last}" if rest else f"its number is {last}"
