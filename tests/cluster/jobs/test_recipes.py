"""The recipes train, shrink, lose a rank and go on; their output satisfies the log rules beside
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit.elastic.settings import read_policy
from chaoskit.fixtures import recipes
from chaoskit.rules import RuleVerdict, check_log_rules, read_rules, replay_log
from faults import Kill, Scale

HERE = Path(recipes.__file__).parent
GPT = {"layers": 1, "heads": 2, "channels": 16, "context": 16, "batch": 8, "evaluate_every": 10}
LLAMA = {
    "layers": 1,
    "heads": 2,
    "groups": 1,
    "channels": 16,
    "hidden": 32,
    "context": 16,
    "batch": 8,
    "mixed": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), [("gpt", GPT), ("llama", LLAMA)])
def test_a_recipe_goes_on_after_a_resize_and_a_loss(
    chaos: Any, tmp_path: Path, recipe: str, options: Any
) -> None:
    if recipe == "llama":
        pytest.importorskip("transformers", reason="pip install 'chaoskit[jobs]'")
    policy = read_policy((HERE / "elastic.yaml").read_bytes())
    small = msgspec.structs.replace(policy, max_replicas=4, scaling_timeout_s=0)
    outcome = chaos.run(
        str(HERE / f"{recipe}.py"),
        nodes=3,
        spares=1,
        steps=40,
        elastic=small,
        options=options,
        disk={"target": str(tmp_path / "store"), "every_steps": 10},
        faults=[Scale(to=2, at_step=6), Kill(rank=1, at_step=18)],
        max_lost_steps=0 if recipe == "gpt" else 3,
    )
    directory = Path(outcome.directory)
    texts = {path.stem: path.read_text() for path in (directory / "log").glob("node*.*.log")}
    whole = "".join(texts.values())
    assert "resized 3 -> 2 ranks" in whole
    assert "rank 1 was lost at step" in whole
    assert "preempted at step" in whole
    (history,) = (directory / "disk").glob("*/history-*.json")
    assert len(json.loads(history.read_text())) > 3
    if recipe == "gpt":
        assert "evaluation at step 10" in whole
        outcome.assert_same_losses_as_twin()
    assert list((tmp_path / "store").rglob("*.distcp"))
    printer = max(
        texts, key=lambda worker: texts[worker].count(" step ")
    )  # rank 0 is the first worker that was ready
    _rules_leave_it_alone_until_it_breaks(directory / "log" / f"{printer}.log", tmp_path)


def _rules_leave_it_alone_until_it_breaks(log: Path, directory: Path) -> None:
    """Assert that the output of rank 0 reaches each rule and satisfies it, and that a NaN does not."""
    replays = replay_log(read_rules(HERE / "rules.yaml"), log)
    assert all(len(replay.points) > 20 for replay in replays)
    assert not [alarm for replay in replays for alarm in replay.alarms]
    broken = directory / "broken.log"
    broken.write_text(re.sub(r"loss \S+", "loss nan", log.read_text()))
    assert {alarm.verdict for alarm in check_log_rules(HERE / "rules.yaml", broken)} == {
        RuleVerdict.NOT_A_NUMBER
    }
