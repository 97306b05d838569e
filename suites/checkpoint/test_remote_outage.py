"""Tests of a store that is out for a while.

Training goes on, and uploads continue when the store is back.

-> checkpoint/remote/uploader.py tries the uploads again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Harness, Outcome, Verdict
from chaoskit.checkpoint import RemoteTier
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.faults import RemoteOutage
from chaoskit.faults.storage.remote import MODES
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.suites.checkpoint.expect import uploaded_after
from chaoskit.suites.recovery.expect import STEADY

pytestmark = pytest.mark.costly

EVERY = 5


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    pytest.importorskip(
        "moto", reason="no S3 server here: pip install 'chaoskit[s3]' 'moto[server]'"
    )
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    """Yield a harness on a substrate of its own, with credentials for its processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with Harness() as harness:
            yield harness


def run(harness: Harness, store: S3Server, bucket: str, disk: Path, **plan: Any) -> Outcome:
    """Run a job that uploads what it stores."""
    return harness.run(
        STEADY,
        nodes=2,
        spares=0,
        options={"step_s": 0.04},
        lease_beats=20,  # uploads and the store take CPU time, which a small machine lacks
        disk={"target": str(disk), "every_steps": EVERY},
        remote={"target": f"s3://{bucket}/job", "endpoint": store.url, "every_steps": EVERY},
        **plan,
    )


@pytest.mark.slow
@pytest.mark.promise(
    "uploads are tried again until the store is back; training goes on", mode="refuse"
)
# a stalled request is given up only after half a minute
@pytest.mark.parametrize("mode", sorted({*MODES} - {"stall"}))
def test_what_is_stored_meanwhile_is_uploaded_when_the_store_is_back(
    harness: Harness, store: S3Server, tmp_path: Path, mode: str
) -> None:
    bucket = f"out-{mode}"
    store.make_bucket(bucket)
    fault = RemoteOutage(at_step=12, mode=mode, heal_after_s=1.0)
    goal = uploaded_after(harness, "lifted")
    plan: dict[str, Any] = {"steps": 40, "until": goal.until, "watch": goal, "deadline_s": 240.0}
    outcome = run(harness, store, bucket, tmp_path / "first", faults=[fault], **plan)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert outcome.recoveries == []
    outcome.assert_same_losses_as_twin()
    (healed_ns,) = [record.t_ns for record in outcome.records("lifted")]
    uploaded = [record for record in outcome.records("saved") if record["tier"] == "remote"]
    assert any(record.t_ns > healed_ns for record in uploaded)
    newest = _newest(store, bucket)
    # the last upload may have ended with the job
    assert newest >= max(record["step"] for record in uploaded)
    resumed = run(
        harness, store, bucket, tmp_path / "second", steps=newest + 3, resume=True, twin=False
    )
    assert [point.step for point in resumed.steps] == [newest, newest + 1, newest + 2]
    restored = resumed.records("restored")
    assert {record["step"] for record in restored} == {newest}
    assert any(record["source"].startswith("remote") for record in restored)


def _newest(store: S3Server, bucket: str) -> int:
    """Return the step of the newest snapshot in the store, after verifying its bytes."""
    tier = RemoteTier(f"s3://{bucket}/job", storage_options=store.options())
    name = tier.names()[0]
    tier.open(name).verify()
    tier.close()
    age = parse_name(name)
    assert age is not None
    return age[0]
