"""Parse the step from the name that a script gives to a checkpoint. Ambiguous names are refused.

-> ``dcp.py``: saves and loads of the snapshot of this step.
-> ``disk/names.py``: the name that chaoskit itself gives to a stored snapshot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.errors import BadInput

CheckpointId = str | os.PathLike[str]

_number_pattern = re.compile(r"\d+")
_step_pattern = re.compile(r"step[-_= ]?(\d+)", re.IGNORECASE)
#: Words before a number that mark it as something else than a step.
_OTHER_LABELS = (
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
_other_label_pattern = re.compile(rf"(?<![a-z])({'|'.join(_OTHER_LABELS)})[-_= ]?$", re.IGNORECASE)
_date_pattern = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\d{4}|\d{6})?")
_sign_pattern = re.compile(r"(^|[^A-Za-z0-9])[-+.]$")
_REMEDY = (
    "write step-N with no number after it, or give SnapshotWriter(step_key=...) or writer.step = N"
)


def step_of(checkpoint_id: CheckpointId) -> int:
    """Return the step that a checkpoint is named after.

    The last part of the path counts. It is a snapshot's own name, or has exactly one number, or
    exactly one ``step-N`` that no other number follows. ``step_N``, ``step=N``, ``step N`` and
    ``stepN`` are accepted, too.

    A letter must not follow the number (``10k``). A single number must not be a date, or have a
    sign or the label of another quantity (``epoch-v2``).

    Raises:
        BadInput: if the name has no number, or none that is clearly the step.
    """
    name = Path(os.fspath(checkpoint_id)).name
    if (age := parse_name(name)) is not None:
        return age[0]
    numbers = list(_number_pattern.finditer(name))
    if not numbers:
        raise BadInput("checkpoint_id", os.fspath(checkpoint_id), "name the step, such as step-120")
    step_matches = list(_step_pattern.finditer(name))
    last = numbers[-1]
    is_only_number = len(numbers) == 1 and not _is_other_quantity(name, last)
    is_last_number = len(step_matches) == 1 and step_matches[0].end() == last.end()
    if (is_only_number or is_last_number) and not name[last.end() :][:1].isalpha():
        return int(last[0])
    raise BadInput(
        "checkpoint_id", os.fspath(checkpoint_id), f"{_REMEDY}: {_list_numbers(numbers)}"
    )


def names_step(checkpoint_id: CheckpointId) -> bool:
    """Return True if :func:`step_of` finds a step."""
    try:
        step_of(checkpoint_id)
    except BadInput:
        return False
    return True


def _is_other_quantity(name: str, number: re.Match[str]) -> bool:
    """Return True if a number has the label of something else, has a sign, or is a date."""
    before = name[: number.start()]
    is_date = _date_pattern.fullmatch(number[0]) is not None and _step_pattern.search(name) is None
    return (
        is_date
        or _other_label_pattern.search(before) is not None
        or _sign_pattern.search(before) is not None
    )


def _list_numbers(numbers: list[re.Match[str]]) -> str:
    """Return a list of the numbers of a name, for an error message."""
    *rest, last = [number[0] for number in numbers]
    return f"its numbers are {', '.join(rest)} and {last}" if rest else f"its number is {last}"
