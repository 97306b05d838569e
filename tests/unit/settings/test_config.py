"""Refusal of settings that cannot work before anything starts, with the field, its value and the
remedy.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.config import RunConfig, validate
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec, resolve_job
from chaoskit.process.host_checks import require_free_port, require_writable

JOB = """
def train(trainer, size="tiny", *, steps=10):
    trainer.register(model=None, optimizer=None)
    with trainer.transaction() as step:
        step.backward(0)


def train_small(trainer):
    with trainer.transaction() as step:
        step.backward(0)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


def config(path: Path, **fields: Any) -> RunConfig:
    return RunConfig(job=JobSpec(str(path)), **fields)


def check(refusal: BadInput, field: str, value: object, remedy: str) -> None:
    """Assert that the error holds field, value and remedy, and that its message shows all three."""
    assert (refusal.field, refusal.value) == (field, value)
    assert remedy in refusal.remedy
    assert str(refusal) == f"{field}={value!r}: {refusal.remedy}"


# -- RunConfig -------------------------------------------------------------------------------------


def test_the_defaults_can_run(job_file: Path) -> None:
    """A configuration that names only its job is valid."""
    validate(config(job_file))


BELOW = {
    "nodes": (0, "1 or more"),
    "spares": (-1, "0 or more"),
    "min_world": (0, "1 or more"),
    "shards": (-1, "0 or more"),
    "buckets": (0, "1 or more"),
    "hash_every": (-1, "0 or more"),
    "state_hash_steps": (-1, "0 or more"),
    "audit_every": (-1, "0 or more"),
    "max_failures": (-1, "0 or more"),
    "heartbeat_ms": (0, "1 or more"),
    "lease_beats": (1, "2 or more"),
    "hang_steps": (0.5, "1 or more"),
    "hang_floor_ms": (0, "1 or more"),
}


@pytest.mark.parametrize("field", BELOW)
def test_a_number_below_its_minimum_is_refused(job_file: Path, field: str) -> None:
    """Each number has a least value: that value passes, the next smaller is refused by name."""
    value, remedy = BELOW[field]
    with pytest.raises(BadInput) as caught:
        validate(config(job_file, **{field: value}))
    check(caught.value, field, value, remedy)
    least = int(remedy.split()[0])
    validate(config(job_file, **({"nodes": 1} | {field: least})))


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        (
            {"heartbeat_ms": 1000, "lease_beats": 180, "coordinator_outage_s": 999.0},
            "collective_timeout_s",
            "before a lost node is noticed",
        ),
        (
            {"heartbeat_ms": 1000, "lease_beats": 60},
            "coordinator_outage_s",
            "away for less than a lease",
        ),
        ({"hang_floor_ms": 180_000}, "collective_timeout_s", "before a hang is found"),
        ({"outside_limit_s": 180.5}, "collective_timeout_s", "between two transactions"),
    ],
)
def test_limits_in_the_wrong_order_are_refused(
    job_file: Path, fields: dict[str, Any], field: str, remedy: str
) -> None:
    """A wait for a failure must have more time than its detection."""
    with pytest.raises(BadInput) as caught:
        validate(config(job_file, **fields))
    check(caught.value, field, getattr(config(job_file), field), remedy)
    validate(config(job_file, **{name: value - 1 for name, value in fields.items()}))


METHOD = """
class Model:
    def train(self, mode=True):
        return self
"""


def test_a_method_with_the_name_of_the_train_function_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(JOB + METHOD)
    assert resolve_job(str(path), {"steps": 5}).options == {"steps": 5}
    path.write_text(METHOD)
    with pytest.raises(BadInput, match="define a function train"):
        resolve_job(str(path))


def test_a_coroutine_is_no_train_function(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(JOB.replace("def train(", "async def train("))
    with pytest.raises(BadInput, match="define train without async"):
        resolve_job(str(path))


def test_a_mesh_in_a_helper_makes_a_sharded_job(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(JOB)
    assert not resolve_job(str(path)).sharded
    helper = "\ndef shard(trainer, model):\n    return trainer.mesh()\n"
    path.write_text(JOB + helper)
    assert not resolve_job(str(path)).sharded, "train does not call it"
    path.write_text(
        JOB.replace("    trainer.register(", "    shard(trainer, None)\n    trainer.register(")
        + helper
    )
    assert resolve_job(str(path)).sharded
    assert not resolve_job(f"{path}:train_small").sharded


def test_a_smallest_world_above_the_full_one_is_refused(job_file: Path) -> None:
    """``min_world`` may be all nodes, not more."""
    validate(config(job_file, nodes=3, min_world=3))
    with pytest.raises(BadInput) as caught:
        validate(config(job_file, nodes=3, min_world=4))
    check(caught.value, "min_world", 4, "at most nodes=3")


def test_fewer_shards_than_nodes_are_refused(job_file: Path) -> None:
    """Every rank needs a shard; 0 stands for one a node."""
    validate(config(job_file, nodes=3, shards=3))
    with pytest.raises(BadInput) as caught:
        validate(config(job_file, nodes=3, shards=2))
    check(caught.value, "shards", 2, "at least nodes=3")
    assert config(job_file, nodes=3).shard_count == 3
    assert config(job_file, nodes=3, shards=7).shard_count == 7


def test_more_nodes_than_gpus_are_refused(job_file: Path) -> None:
    """``device="cuda"`` needs a GPU a node; the message counts the present GPUs."""
    device_count = torch.cuda.device_count()
    with pytest.raises(BadInput) as caught:
        validate(config(job_file, device="cuda", nodes=device_count + 1))
    check(
        caught.value, "device", "cuda", f"{device_count} CUDA devices for {device_count + 1} nodes"
    )


def test_unknown_fields_are_refused_when_a_config_arrives(job_file: Path) -> None:
    """Coordinator, agents and workers of different versions do not guess each other's fields."""
    data = msgspec.to_builtins(config(job_file))
    assert msgspec.convert(data, RunConfig) == config(job_file)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data | {"more": 1}, RunConfig)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data | {"device": "tpu"}, RunConfig)


@settings(max_examples=100, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from([*BELOW]), st.integers(-1, 6)))
def test_exactly_the_configurations_that_cannot_work_are_refused(fields: dict[str, int]) -> None:
    """Any combination of numbers passes if every rule holds; otherwise a field that breaks a rule
    is named.
    """
    configuration = RunConfig(job=resolve_job("gpt"), **fields)  # type: ignore[arg-type]
    broken = {
        name
        for name, (_, remedy) in BELOW.items()
        if getattr(configuration, name) < int(remedy.split()[0])
    }
    broken |= {"min_world"} if configuration.min_world > configuration.nodes else set()
    broken |= {"shards"} if 0 < configuration.shards < configuration.nodes else set()
    if not broken:
        validate(configuration)
        return
    with pytest.raises(BadInput) as caught:
        validate(configuration)
    assert caught.value.field in broken
    assert caught.value.value == getattr(configuration, caught.value.field)


def test_the_job_of_a_configuration_is_checked_too(tmp_path: Path) -> None:
    """A hand-made JobSpec is held to the same rules; its file must exist, too."""
    missing = tmp_path / "missing.py"
    with pytest.raises(BadInput) as caught:
        validate(config(missing))
    check(caught.value, "job", str(missing), "name a Python file that can be read")


# -- jobs ------------------------------------------------------------------------------------------


def test_a_job_is_found_by_name() -> None:
    """``gpt`` is the reference job, imported as a module."""
    job = resolve_job("gpt", {"size": "tiny"})
    assert job.module == "chaoskit.fixtures.jobs.gpt"
    assert (job.function, job.options, job.name) == ("train", {"size": "tiny"}, "gpt")
    assert Path(job.path).is_file()


def test_a_job_is_found_by_file(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file is named by any path, and known by its absolute path, which holds in every process."""
    monkeypatch.chdir(job_file.parent)
    job = resolve_job("train.py", {"steps": 5})
    assert job == resolve_job(str(job_file), {"steps": 5})
    assert (Path(job.path), job.module, job.function, job.name) == (
        job_file.resolve(),
        "",
        "train",
        "train",
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    validate(RunConfig(job=job))


def test_a_job_is_found_by_file_and_function(job_file: Path) -> None:
    """``train.py:train_small`` picks a function of a file, and shows it in the job's name."""
    job = resolve_job(f"{job_file}:train_small")
    assert (job.function, job.name) == ("train_small", "train:train_small")


@pytest.mark.parametrize("target", ["nothing", "", "gpt.more", "../gpt", "os.path", ":train"])
def test_an_unknown_name_is_refused(target: str) -> None:
    """The error for an unknown job says how jobs are named."""
    with pytest.raises(BadInput) as caught:
        resolve_job(target)
    check(
        caught.value,
        "job",
        target,
        "name a reference job such as 'gpt', or a file such as 'train.py'",
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """Neither a path without a file nor a directory is a job."""
    (tmp_path / "folder.py").mkdir()
    for name in ("missing.py", "folder.py"):
        with pytest.raises(BadInput) as caught:
            resolve_job(str(tmp_path / name))
        check(caught.value, "job", str(tmp_path / name), "name a Python file that exists")


REFUSED_JOBS = {
    "missing function": (
        "def other(trainer): trainer.x.backward()",
        "define a function train(trainer, ...)",
    ),
    "no argument": (
        "def train(): x.backward()",
        "let train take the trainer as its first argument",
    ),
    "syntax error": (
        "x = 1\ndef train(trainer)\n    x.backward()",
        "correct the syntax error in line 2",
    ),
    "no loss": (
        "def train(trainer):\n    trainer.register(model=None)",
        "call step.backward(loss)",
    ),
    "not text": ("\udcff\udcfe", "name a Python file that can be read"),
}


@pytest.mark.parametrize("case", REFUSED_JOBS)
def test_a_file_that_cannot_be_a_job_is_refused(tmp_path: Path, case: str) -> None:
    """Each reason why a file is no job is distinguished, without running it."""
    source, remedy = REFUSED_JOBS[case]
    path = tmp_path / "job.py"
    path.write_bytes(
        (source + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n").encode(errors="surrogateescape")
    )
    with pytest.raises(BadInput) as caught:
        resolve_job(str(path))
    check(caught.value, "job", str(path), remedy)
    assert not (tmp_path / "ran").exists()


def test_a_missing_named_function_is_refused(job_file: Path) -> None:
    """The message names the requested function."""
    with pytest.raises(BadInput) as caught:
        resolve_job(f"{job_file}:train_large")
    check(caught.value, "job", str(job_file), "define a function train_large(trainer, ...)")


def test_a_loss_in_another_file_is_not_missed(tmp_path: Path) -> None:
    """A train function that hands its trainer to code elsewhere may have its loss there."""
    path = tmp_path / "job.py"
    path.write_text("import loop\n\ndef train(trainer):\n    loop.run(trainer)\n")
    assert resolve_job(str(path)).function == "train"


def test_an_unknown_option_is_refused_with_the_known_ones(job_file: Path) -> None:
    """The message lists the options of the function; a function that takes any option
    refuses none.
    """
    with pytest.raises(BadInput) as caught:
        resolve_job(str(job_file), {"size": "tiny", "stepz": 3})
    check(caught.value, "options.stepz", 3, "write steps; train takes size, steps: leave stepz out")
    with pytest.raises(BadInput) as caught:
        resolve_job(f"{job_file}:train_small", {"x": 1})
    check(caught.value, "options.x", 1, "train_small takes no options: leave x out")
    job_file.write_text("def train(trainer, **options): trainer.run(trainer)")
    assert resolve_job(str(job_file), {"anything": 1}).options == {"anything": 1}


def test_the_trainer_is_not_an_option(job_file: Path) -> None:
    """The first argument is the trainer, even if it is positional only; those after it are
    options.
    """
    with pytest.raises(BadInput) as caught:
        resolve_job(str(job_file), {"trainer": 1})
    check(caught.value, "options.trainer", 1, "train takes size, steps")
    job_file.write_text("def train(trainer, /, size=1): trainer.run(trainer)")
    assert resolve_job(str(job_file), {"size": 2}).options == {"size": 2}
    with pytest.raises(BadInput) as caught:
        resolve_job(str(job_file), {"trainer": 1})
    check(caught.value, "options.trainer", 1, "train takes size")


def test_an_option_that_is_not_json_is_refused(job_file: Path) -> None:
    """Options cross processes as JSON, so an object is refused here and not in a worker."""
    options = {"size": object()}
    with pytest.raises(BadInput) as caught:
        resolve_job(str(job_file), options)
    check(caught.value, "options", options, "use plain JSON values")


def test_a_missing_option_is_refused(job_file: Path) -> None:
    """An argument without a default needs a value, which only the options can give."""
    for source in (
        "def train(trainer, lr): trainer.run(trainer)",
        "def train(trainer, *, lr): trainer.run(trainer)",
    ):
        job_file.write_text(source)
        with pytest.raises(BadInput) as caught:
            resolve_job(str(job_file))
        check(caught.value, "options.lr", None, "give this option a value")
        assert resolve_job(str(job_file), {"lr": 1}).options == {"lr": 1}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", 3, "3"),
        ("int", 3, True),
        ("float", 3, "3"),
        ("str", "a", 1),
        ("bool", False, 0),
        ("int | None", None, 1.5),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(
    job_file: Path, annotation: str, good: Any, bad: Any
) -> None:
    """A plain annotation is kept, so that a typing error does not fail on every rank instead."""
    job_file.write_text(f"def train(trainer, x: {annotation} = None): trainer.run(trainer)")
    assert resolve_job(str(job_file), {"x": good}).options == {"x": good}
    with pytest.raises(BadInput) as caught:
        resolve_job(str(job_file), {"x": bad})
    check(caught.value, "options.x", bad, f"use a value of type {annotation}")


# -- what the machine must offer -------------------------------------------------------------------


def test_a_port_in_use_is_refused() -> None:
    """A port in use is refused by number; as soon as it is free, it is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BadInput) as caught:
            require_free_port("port", "127.0.0.1", port)
        check(caught.value, "port", port, "choose a free port, or 0 for any")
    require_free_port("port", "127.0.0.1", port)


def test_a_port_whose_last_connection_lingers_is_free() -> None:
    """TIME_WAIT of an earlier run does not block the port of this run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            server.close()  # the side that closes first lingers
            assert client.recv(1) == b""
    require_free_port("port", "127.0.0.1", port)


def test_port_0_is_always_free() -> None:
    """Port 0 passes, as the system chooses a free port for it."""
    require_free_port("port", "127.0.0.1", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    """Numbers outside the range of ports are bad input, too."""
    with pytest.raises(BadInput) as caught:
        require_free_port("coordinator_port", "127.0.0.1", port)
    check(caught.value, "coordinator_port", port, "choose a port from 1 to 65535")


def test_a_directory_that_can_be_made_is_accepted_and_not_made(tmp_path: Path) -> None:
    """The parents of a missing directory decide whether it can be created, and it is not
    created.
    """
    require_writable("output", tmp_path / "a" / "b")
    require_writable("output", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", [Path("file"), Path("file/x"), Path("file/x/y")])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, below: Path) -> None:
    """A path at or below a regular file can be written by no user, root included."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput) as caught:
        require_writable("output", tmp_path / below)
    check(caught.value, "output", str(tmp_path / below), "choose a directory that can be written")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_directory_without_room_for_files_is_refused() -> None:
    """A directory that exists but takes no files is detected by a trial, not by its mode."""
    with pytest.raises(BadInput) as caught:
        require_writable("output", Path("/proc/self/fdinfo"))
    check(caught.value, "output", "/proc/self/fdinfo", "choose a directory that can be written")
