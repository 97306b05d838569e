"""GPUs: what NVML said in recordings, through its real binding, and, where there is one, on a GPU."""

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

from chaoskit.health import Finding, Limits, gpu, nvml, xid
from chaoskit.health.gpu import Device, GpuReading

LIMITS = Limits()


def judged(recording: str, limits: Limits = LIMITS) -> dict[str, list[Finding]]:
    """Findings of a recording by severity, without those that only tell that there is nothing."""
    found = gpu.judge(nvml.read(RecordedNvml(recording)), limits)
    return {
        severity: [one for one in found if one.severity == severity]
        for severity in ("ok", "warn", "bad")
    }


def named(found: list[Finding]) -> set[tuple[str, float | str]]:
    return {(one.what, one.value) for one in found}


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
    """A power cap is how GPUs are run; a slowdown in one look of three is a change of clocks."""
    found = judged(recording)
    assert (found["warn"], found["bad"]) == ([], [])
    assert ("gpu0.ecc_uncorrected_volatile", 0.0) in named(found["ok"])


def test_a_gpu_that_fell_off_the_bus() -> None:
    found = judged("h100_fallen_off_the_bus", Limits(gpus_expected=2))
    assert named(found["bad"]) == {("gpu.count", 1.0), ("gpu1.lost", "lost"), ("gpu1.xid", 79.0)}
    assert all("restart the machine" in one.remedy for one in found["bad"])
    assert ("gpu0.lost", "no") in named(found["ok"])


def test_clocks_that_the_hardware_holds_down() -> None:
    found = judged("h100_throttled")
    assert named(found["bad"]) == {
        ("gpu0.temperature_c", 91),
        ("gpu0.clocks", "held down"),
        ("gpu1.clocks", "held down"),
    }
    details = {one.what: one.detail for one in found["bad"]}
    assert details["gpu0.clocks"] == "hardware slowdown, hardware thermal slowdown"
    assert details["gpu1.clocks"] == "power brake"
    assert named(found["warn"]) == {("gpu2.temperature_c", 86), ("gpu2.clocks", "held down")}


def test_errors_of_the_application_are_not_held_against_the_node() -> None:
    found = judged("h100_application")
    assert (found["warn"], found["bad"]) == ([], [])
    told = {one.value: one.detail for one in found["ok"] if one.what == "gpu0.xid"}
    assert set(told) == {13.0, 31.0, 43.0, 45.0}
    assert (
        told[45.0]
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
    assert all(one.remedy for one in uncontained["bad"])


def test_retired_pages_of_gpus_before_ampere() -> None:
    found = judged("v100_retired_pages")
    assert named(found["bad"]) == {("gpu0.retired_pages", 60.0)}
    assert named(found["warn"]) == {("gpu0.retirement_pending", "yes")}


def test_link_and_firmware_errors_are_told_of_the_gpu_that_has_them() -> None:
    found = judged("gsp_timeout")
    assert named(found["bad"]) == {("gpu1.xid", 119.0), ("gpu1.xid", 74.0)}
    assert [(one.what, one.value, one.detail) for one in found["warn"]] == [
        ("gpu0.xid", 167.0, "not in the table of chaoskit")
    ]


def test_no_gpu_is_no_error_unless_one_is_expected() -> None:
    assert [one.severity for one in gpu.judge(nvml.read(RecordedNvml("no_driver")), LIMITS)] == [
        "ok"
    ]
    missed = gpu.judge(nvml.read(RecordedNvml("no_driver")), Limits(gpus_expected=8))
    assert [(one.what, one.severity) for one in missed] == [("gpu.count", "bad")]
    fewer = gpu.judge(nvml.read(RecordedNvml("h100_healthy")), Limits(gpus_expected=8))
    assert [(one.value, one.limit) for one in fewer if one.severity == "bad"] == [(2.0, 8)]


def test_a_driver_that_does_not_work_is_bad_whatever_is_expected() -> None:
    (found,) = gpu.judge(nvml.read(RecordedNvml("driver_mismatch")), LIMITS)
    assert (found.what, found.severity) == ("gpu.driver", "bad")


def test_what_has_risen_since_the_last_reading_is_bad() -> None:
    """An aggregate counter may be old news; its rise is not."""
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
    assert [one.what for one in risen if one.severity == "bad"] == ["gpu0.ecc_uncorrected_risen"]
    assert not [one for one in gpu.judge(after, LIMITS, after) if one.severity == "bad"]
    other = GpuReading(devices=(msgspec.structs.replace(after.devices[0], uuid="b"),))
    assert not [one for one in gpu.judge(other, LIMITS, before) if one.severity == "bad"], (
        "another GPU, not a rise"
    )


def test_xids_belong_to_their_gpu_and_are_not_forgotten() -> None:
    """A GSP timeout may leave no other trace: who reads twice must not take the GPU for healthy again."""
    reader = nvml.Nvml(RecordedNvml("gsp_timeout"))
    assert reader.await_xid(0.0)
    readings = [reader.read(), reader.read()]
    assert not reader.await_xid(0.0), "these are old"
    reader.close()
    for reading in readings:
        assert [device.xids for device in reading.devices] == [(167,), (119, 74)]


@given(st.integers(0, 300))
def test_every_xid_has_a_class_and_what_is_bad_a_remedy(number: int) -> None:
    known = xid.classify(number)
    assert known.number == number
    assert known.name
    assert bool(known.remedy) == (known.severity != "ok") == (not known.application)


def test_the_fatal_xids_are_bad_and_the_jobs_own_are_not() -> None:
    assert {xid.classify(number).severity for number in (48, 64, 74, 79, 95, 119, 120, 140)} == {
        "bad"
    }
    assert {xid.classify(number).severity for number in (63, 92, 94)} == {"warn"}
    assert {xid.classify(number).severity for number in (13, 31, 43, 45)} == {"ok"}


# -- without recordings -------------------------------------------------------------------------------------------


def test_a_machine_without_the_binding_says_so() -> None:
    code = "import sys; sys.modules['pynvml'] = None; from chaoskit.health import nvml; print(nvml.read().absent)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nvidia-ml-py is not installed" in told.stdout


def test_through_the_real_binding(tmp_path: Path) -> None:
    """A C library with NVML's names and types, loaded by the real ``pynvml``: no argument is in the wrong place."""
    (tmp_path / "xids").write_text("1 79\n0 31\n")
    code = "import msgspec; from chaoskit.health import nvml; print(msgspec.json.encode(nvml.read()).decode())"
    environment = stub_nvml.environment(tmp_path, tmp_path / "xids")
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    reading = msgspec.convert(json.loads(told.stdout), GpuReading)
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
    """Where torch sees a GPU, NVML sees it too, and it is fit: nobody could have run this test on one that is not."""
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
    assert not [one for one in gpu.judge(reading, LIMITS) if one.severity == "bad"]
