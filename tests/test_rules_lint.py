"""The linter of timeouts: each contradiction is found, in the files where users have them, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaoskit.config import JobSpec, RunConfig
from chaoskit.errors import BadInput
from chaoskit.rules import parse_rules
from chaoskit.rules.lint import ORDERS, Finding, in_order, lint, lint_config
from chaoskit.rules.settings import KNOWN, Setting, Settings, read_settings

HYPERPOD = """
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
spec:
  replicaSpecs:
    - template:
        spec:
          terminationGracePeriodSeconds: {grace}
          containers:
            - command: [hyperpodrun, --rdzv-conf, "join_timeout=900,last_call_timeout=60", train.py]
              env:
                - name: TORCH_NCCL_ASYNC_ERROR_HANDLING
                  value: "{handling}"
  runPolicy:
    logMonitoringConfiguration:
      - name: hang
        logPattern: ".*loss.*"
        expectedStartCutOffInSeconds: {start}
        expectedRecurringFrequencyInSeconds: {often}
"""


def found(directory: Path, **files: str) -> list[Finding]:
    paths = []
    for name, text in files.items():
        paths.append(directory / name.replace("_", "."))
        paths[-1].write_text(text)
    return lint(paths)


def ids(findings: list[Finding]) -> list[str]:
    return [one.id for one in findings]


def test_a_job_of_hyperpod(tmp_path: Path) -> None:
    good = HYPERPOD.format(grace=120, handling=3, start=1200, often=700)
    assert found(tmp_path, job_yaml=good) == []
    bad = HYPERPOD.format(grace=20, handling=0, start=120, often=300)
    findings = found(tmp_path, job_yaml=bad)
    assert ids(findings) == ["K801", "NC01", "LR01", "LR02"]
    assert findings[0].settings == ("shutdown_timeout=30 (default)", "terminationGracePeriodSeconds=20")
    assert findings[0].remedy == "set terminationGracePeriodSeconds above 30, or shutdown_timeout below 20"
    assert findings[2].settings == (
        "hang: expectedRecurringFrequencyInSeconds=300",
        "process_group_timeout=600 (default)",
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run_toml", "heartbeat_ms = 1000\nlease_beats = 200", ["CK01", "CK04"]),
        ("run_json", '{"hang_floor_ms": 5000, "collective_timeout_s": 5, "outside_limit_s": 4}', ["CK02"]),
        ("run_yaml", "outside_limit_s: 600", ["CK03"]),
        ("run_yaml", "outside_limit_s: 120", []),
        ("go_sh", "torchrun --rdzv-conf=join_timeout=30,last_call_timeout=60 train.py", ["TR01"]),
        ("go_sh", "torchrun --rdzv-conf heartbeat_timeout=20 train.py", ["TR02"]),
        ("go_sh", "torchrun --monitor-interval 900 train.py --ddp_timeout 600", ["TR03"]),
        ("go_sh", "torchrun --rdzv_conf 'keep_alive_interval=300' t.py --distributed-timeout-minutes 10", ["TR04"]),
        ("go_sh", "# torchrun --rdzv-conf join_timeout=1\nexport TORCHFT_TIMEOUT_SEC=60", []),
        ("go_env", "TORCH_NCCL_ENABLE_MONITORING=0\nTORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60", ["NC02"]),
        ("go_sh", "torchft_lighthouse --join_timeout_ms 90000", ["TF01"]),
        ("go_env", "TORCHFT_QUORUM_TIMEOUT_SEC=60", ["TF01"]),
        ("go_env", "TORCHFT_QUORUM_TIMEOUT_SEC=4", ["TF01", "TF02"]),
        ("go_env", "TORCHFT_TIMEOUT_SEC=2", ["TF03"]),
        ("go_sh", "torchft_lighthouse --quorum_tick_ms 6000", ["TF04"]),
        ("nvrx_yaml", "inprocess: {soft_timeout: 100}", ["NV01"]),
        ("nvrx_yaml", "inprocess: {hard_timeout: 200}", ["NV02"]),
        ("nvrx_yaml", "inprocess: {heartbeat_timeout: 120}", ["NV03"]),
        ("nvrx_yaml", "fault_tolerance: {initial_rank_heartbeat_timeout: 600}", ["NV08"]),
        ("nvrx_yaml", "fault_tolerance: {initial_rank_heartbeat_timeout: null}", []),
        ("go_sh", "ft_launcher --ft-rank-heartbeat-timeout=4 train.py", ["NV09"]),
        ("nvrx_yaml", "{soft_timeout: 50, train_timeout_seconds: 50}", ["NV07"]),
        ("nvrx_yaml", "{rank_heartbeat_timeout: 300, ddp_timeout: 600}", ["NV10"]),
        ("pod_yaml", "{kind: Pod, spec: {terminationGracePeriodSeconds: 3}, termination_grace_time: 5}", ["K802"]),
        ("rules_yaml", "[{name: a, logPattern: x, expectedRecurringFrequencyInSeconds: 9}]", ["LR03"]),
    ],
)
def test_contradictions(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    assert ids(found(tmp_path, **{name: text})) == expected


SCRIPT = """
from datetime import timedelta
import nvidia_resiliency_ext.inprocess as inprocess

dist.init_process_group("nccl", timeout=timedelta(minutes={minutes}))

@inprocess.Wrapper(soft_timeout = datetime.timedelta(seconds=50), heartbeat_timeout=timedelta(seconds=30))
def train(): ...
"""


def test_a_script_in_python(tmp_path: Path) -> None:
    assert found(tmp_path, train_py=SCRIPT.format(minutes=10)) == []
    findings = found(tmp_path, train_py=SCRIPT.format(minutes=0.5))
    assert [(one.id, one.settings) for one in findings] == [("NV07", ("soft_timeout=50", "process_group_timeout=30"))]


def test_files_are_read_together(tmp_path: Path) -> None:
    rules = "[{name: a, logPattern: x, expectedStartCutOffInSeconds: 60, expectedRecurringFrequencyInSeconds: 30}]"
    findings = found(tmp_path, rules_yaml=rules, run_toml="outside_limit_s = 40")
    assert ids(findings) == ["LR01"]
    assert findings[0].settings == ("a: expectedRecurringFrequencyInSeconds=30", "outside_limit_s=40")


def test_the_rules_of_a_run_of_our_own() -> None:
    rule = {"name": "a", "logPattern": "x", "expectedStartCutOffInSeconds": 60}
    frequent = rule | {"expectedRecurringFrequencyInSeconds": 30}
    rules, often = (tuple(parse_rules([one])) for one in (rule, frequent))
    assert lint_config(RunConfig(job=JobSpec("job.py"), rules=rules)) == []
    assert ids(lint_config(RunConfig(job=JobSpec("job.py"), rules=often))) == ["LR01"]
    assert ids(lint_config(RunConfig(job=JobSpec("job.py"), rules=often, outside_limit_s=20.0))) == []
    assert ids(lint_config(RunConfig(job=JobSpec("job.py"), heartbeat_ms=30_000, lease_beats=7))) == ["CK01", "CK04"]


def test_a_rule_that_only_alerts_may_be_early(tmp_path: Path) -> None:
    rule = "{name: a, logPattern: x, expectedRecurringFrequencyInSeconds: 9, action: alert}"
    assert found(tmp_path, job_yaml=f"{{ddp_timeout: 600, logMonitoringConfiguration: [{rule}]}}") == []


@pytest.mark.parametrize(("name", "text"), [("a_yaml", "x: 1"), ("a_sh", "echo"), ("a_yaml", "startup_s: soon")])
def test_files_that_say_nothing_are_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(BadInput):
        found(tmp_path, **{name: text})


def test_every_order_names_known_settings_and_holds_on_defaults() -> None:
    known = {one.key: one for one in KNOWN}
    assert len({order.id for order in ORDERS}) == len(ORDERS)
    for order in ORDERS:
        pair = [known[key] for key in (order.shorter, order.longer)]
        # as if a user had written the defaults: torchft and Kubernetes have ties
        given = {one.key: Setting(one, (one.default or 0) * one.unit_s, "x") for one in pair}
        assert not [one for one in in_order(order, Settings(given)) if one.severity == "error"]


def test_a_later_file_wins(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("TORCHFT_TIMEOUT_SEC=5")
    (tmp_path / "b.env").write_text("TORCHFT_TIMEOUT_SEC=7")
    found = read_settings([tmp_path / "a.env", tmp_path / "b.env"]).get("torchft.TORCHFT_TIMEOUT_SEC")
    assert found is not None
    assert found.value == 7
