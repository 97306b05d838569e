"""Tests of GPU findings: recordings of NVML, its real binding, and a real GPU if there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import stub_nvml
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_nvml import RECORDINGS, RecordedNvml

from chaoskit.health import Finding, HealthLimits, gpu, nvml, xid
from chaoskit.health.gpu import Device, GpuReading

LIMITS = HealthLimits()


def judged(recording: str, limits: HealthLimits = LIMITS) -> dict[str, list[Finding]]:
    """Return the findings of a recording by severity."""
    findings = gpu.judge(nvml.read(RecordedNvml(recording)), limits)
    return {
        severity: [finding for finding in findings if finding.severity == severity]
        for severity in ("ok", "warn", "bad")
    }


def named(findings: list[Finding]) -> set[tuple[str, float | str]]:
    return {(finding.what, finding.value) for finding in findings}


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_recording_is_read_whole_and_nothing_stays_open(recording: str) -> None:
    library = RecordedNvml(recording)
    reading = nvml.read(library)
    assert (library.inits, library.open_sets) == (0, 0)
    assert msgspec.json.decode(msgspec.json.encode(reading), type=GpuReading) == reading
    for device in reading.devices:
        assert device.uuid
        assert device.lost or device.temperature_c is not None
        assert device.errors == ()


@pytest.mark.parametrize("recording", ["h100_healthy", "h100_busy"])
def test_a_healthy_gpu_is_good_also_at_its_power_limit(recording: str) -> None:
    """GPUs are often run at their power limit; a slowdown in one look of three is a change of
    clocks.
    """
    findings = judged(recording)
    assert (findings["warn"], findings["bad"]) == ([], [])
    assert ("gpu0.ecc_uncorrected_volatile", 0.0) in named(findings["ok"])


def test_a_gpu_that_fell_off_the_bus() -> None:
    findings = judged("h100_fallen_off_the_bus", HealthLimits(gpus_expected=2))
    assert named(findings["bad"]) == {("gpu.count", 1.0), ("gpu1.lost", "lost"), ("gpu1.xid", 79.0)}
    assert all("restart the machine" in finding.remedy for finding in findings["bad"])
    assert ("gpu0.lost", "no") in named(findings["ok"])


def test_clocks_that_the_hardware_holds_down() -> None:
    findings = judged("h100_throttled")
    assert named(findings["bad"]) == {
        ("gpu0.temperature_c", 91),
        ("gpu0.clocks", "held down"),
        ("gpu1.clocks", "held down"),
    }
    details = {finding.what: finding.detail for finding in findings["bad"]}
    assert details["gpu0.clocks"] == "hardware slowdown, hardware thermal slowdown"
    assert details["gpu1.clocks"] == "power brake"
    assert named(findings["warn"]) == {("gpu2.temperature_c", 86), ("gpu2.clocks", "held down")}


def test_errors_of_the_application_are_not_held_against_the_node() -> None:
    findings = judged("h100_application")
    assert (findings["warn"], findings["bad"]) == ([], [])
    details = {
        finding.value: finding.detail for finding in findings["ok"] if finding.what == "gpu0.xid"
    }
    assert set(details) == {13.0, 31.0, 43.0, 45.0}
    assert (
        details[45.0]
        == "cleanup after the application ended, 2 times: of the application, not of the node"
    )


def test_a_contained_error_is_a_warning_an_uncontained_one_is_not() -> None:
    contained = judged("a100_contained")
    assert contained["bad"] == []
    assert named(contained["warn"]) == {
        ("gpu0.xid", 63.0),
        ("gpu0.xid", 94.0),
        ("gpu0.ecc_uncorrected_aggregate", 3.0),
        ("gpu0.remap_pending", "yes"),
    }
    uncontained = judged("a100_uncontained")
    assert named(uncontained["bad"]) == {
        ("gpu0.xid", 48.0),
        ("gpu0.xid", 64.0),
        ("gpu0.xid", 95.0),
        ("gpu0.recovery_action", "reset the GPU"),
        ("gpu0.ecc_uncorrected_volatile", 2.0),
        ("gpu0.remap_failed", "yes"),
    }
    assert all(finding.remedy for finding in uncontained["bad"])


def test_retired_pages_of_gpus_before_ampere() -> None:
    findings = judged("v100_retired_pages")
    assert named(findings["bad"]) == {("gpu0.retired_pages", 60.0)}
    assert named(findings["warn"]) == {("gpu0.retirement_pending", "yes")}


def test_link_and_firmware_errors_are_told_of_the_gpu_that_has_them() -> None:
    findings = judged("gsp_timeout")
    assert named(findings["bad"]) == {("gpu1.xid", 119.0), ("gpu1.xid", 74.0)}
    assert [(finding.what, finding.value, finding.detail) for finding in findings["warn"]] == [
        ("gpu0.xid", 167.0, "not in the table of chaoskit")
    ]


def test_no_gpu_is_no_error_unless_one_is_expected() -> None:
    assert [
        finding.severity for finding in gpu.judge(nvml.read(RecordedNvml("no_driver")), LIMITS)
    ] == ["ok"]
    missed = gpu.judge(nvml.read(RecordedNvml("no_driver")), HealthLimits(gpus_expected=8))
    assert [(finding.what, finding.severity) for finding in missed] == [("gpu.count", "bad")]
    fewer = gpu.judge(nvml.read(RecordedNvml("h100_healthy")), HealthLimits(gpus_expected=8))
    assert [(finding.value, finding.limit) for finding in fewer if finding.severity == "bad"] == [
        (2.0, 8)
    ]


def test_a_driver_that_does_not_work_is_bad_whatever_is_expected() -> None:
    (finding,) = gpu.judge(nvml.read(RecordedNvml("driver_mismatch")), LIMITS)
    assert (finding.what, finding.severity) == ("gpu.driver", "bad")


def test_what_has_risen_since_the_last_reading_is_bad() -> None:
    """An aggregate counter may be old; its rise is new."""
    before = GpuReading(
        devices=(
            Device(index=0, uuid="a", ecc_uncorrected_aggregate=7, ecc_uncorrected_volatile=0),
        )
    )
    after = GpuReading(
        devices=(
            Device(index=0, uuid="a", ecc_uncorrected_aggregate=8, ecc_uncorrected_volatile=0),
        )
    )
    risen = gpu.judge(after, LIMITS, before)
    assert [finding.what for finding in risen if finding.severity == "bad"] == [
        "gpu0.ecc_uncorrected_risen"
    ]
    assert not [finding for finding in gpu.judge(after, LIMITS, after) if finding.severity == "bad"]
    other = GpuReading(devices=(msgspec.structs.replace(after.devices[0], uuid="b"),))
    assert not [
        finding for finding in gpu.judge(other, LIMITS, before) if finding.severity == "bad"
    ], "another GPU, not a rise"


def test_xids_belong_to_their_gpu_and_are_not_forgotten() -> None:
    """A GSP timeout may leave no other trace: a second reading must not take the GPU for healthy
    again.
    """
    reader = nvml.Nvml(RecordedNvml("gsp_timeout"))
    assert reader.await_xid(0.0)
    readings = [reader.read(), reader.read()]
    assert not reader.await_xid(0.0), "these are old"
    reader.close()
    for reading in readings:
        assert [device.xids for device in reading.devices] == [(167,), (119, 74)]


@given(st.integers(0, 300))
def test_every_xid_has_a_class_and_what_is_bad_a_remedy(number: int) -> None:
    xid_class = xid.classify(number)
    assert xid_class.number == number
    assert xid_class.name
    assert bool(xid_class.remedy) == (xid_class.severity != "ok") == (not xid_class.application)


def test_the_fatal_xids_are_bad_and_the_jobs_own_are_not() -> None:
    assert {xid.classify(number).severity for number in (48, 64, 74, 79, 95, 119, 120, 140)} == {
        "bad"
    }
    assert {xid.classify(number).severity for number in (63, 92, 94)} == {"warn"}
    assert {xid.classify(number).severity for number in (13, 31, 43, 45)} == {"ok"}


# -- without recordings ----------------------------------------------------------------------------


def test_a_machine_without_the_binding_says_so() -> None:
    code = "import sys; sys.modules['pynvml'] = None; from chaoskit.health import nvml; print(nvml.read().absent)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "nvidia-ml-py is not installed" in process.stdout


def test_through_the_real_binding(tmp_path: Path) -> None:
    """A C library with NVML's names and types is loaded by the real ``pynvml``, so that each
    argument is checked.
    """
    (tmp_path / "xids").write_text("1 79\n0 31\n")
    code = "import msgspec; from chaoskit.health import nvml; print(msgspec.json.encode(nvml.read()).decode())"
    environment = stub_nvml.environment(tmp_path, tmp_path / "xids")
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    reading = msgspec.convert(json.loads(process.stdout), GpuReading)
    assert reading == GpuReading(
        driver="570.00",
        devices=(
            Device(
                index=0,
                name="Stub 80GB",
                uuid="GPU-one",
                temperature_c=41,
                slowdown_c=89,
                clock_reasons=0x04,
                ecc_uncorrected_volatile=0,
                ecc_uncorrected_aggregate=9,
                remapped_uncorrected=3,
                remap_pending=True,
                remap_failed=False,
                recovery_action=0,
                xids=(31,),
            ),
            Device(index=1, uuid="GPU-two", lost=True, xids=(79,)),
        ),
    )


@pytest.mark.gpu
def test_on_a_real_gpu() -> None:
    """NVML sees a GPU if torch does, and the GPU is fit, since this test could not have run on
    another one.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (pip install 'chaoskit[gpu]')")
    reading = nvml.read()
    assert len(reading.devices) >= torch.cuda.device_count()
    first = reading.devices[0]
    assert first.name
    assert first.uuid.startswith("GPU-")
    assert first.temperature_c is not None
    assert 0 < first.temperature_c < 120
    assert not [finding for finding in gpu.judge(reading, LIMITS) if finding.severity == "bad"]
