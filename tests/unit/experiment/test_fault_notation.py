"""Tests of faults as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaoskit.errors import BadInput
from chaoskit.faults import Cut, Hang, Kill, KillNode
from chaoskit.faults.base import Fault
from chaoskit.faults.notation import parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Kill(rank=1, at_step=20)", Kill(rank=1, at_step=20)),
        (" kill(rank=1,\n after_s=5) ", Kill(rank=1, after_s=5)),
        ("Hang(rank='any', at_step=3)", Hang(rank="any", at_step=3)),
        ("KillNode(node='llama-1', after_s=5)", KillNode(node="llama-1", after_s=5)),
        (
            "Cut(rank=0, at_step=3, apart_from=(1, 2), heal_after_s=4.5)",
            Cut(rank=0, at_step=3, apart_from=(1, 2), heal_after_s=4.5),
        ),
    ],
)
def test_a_text_is_the_fault_that_python_would_make(text: str, fault: object) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Kill(",
        "Kill(1)",
        "Kil(rank=1)",
        "Kill(rank=1, at_stepp=3)",
        "Kill(rank=__import__('os').getpid())",
        "Kill(**{'rank': 1})",
        "faults.Kill(rank=1)",
        "Kill(rank=1) or Kill(rank=2)",
        "(" * 500,
    ],
)
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_fault(text)
    assert refused.value.field in ("fault", "Kill.at_stepp")
    assert "\n" not in str(refused.value)


def test_nothing_of_a_text_is_executed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="plain value"):
        parse_fault(f"Kill(rank=open({str(tmp_path / 'made')!r}, 'w').write('x'), at_step=1)")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "fault",
    [Kill(rank=1, at_step=3), Hang(rank=0, after_s=2.5), KillNode(node="llama-1", after_s=5.0)],
)
def test_reports_show_faults_in_this_form(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault
