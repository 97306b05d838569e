"""Bad input on the command line and in tests: one line with the option as typed, status 2, and
nothing is started.

Cases of the command line run in this process, through the function that the command ``chaoskit``
calls. Cases of pytest run in sessions of their own, where the test fails with one line.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from chaoskit.cli.app import run

_SCRIPT = """
import torch


def train(trainer, *, steps: int = 5):
    model = torch.nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(torch.zeros(64, 1), batch_size=8):
                step.backward(model(shard.batch).mean())
"""


def _plan(**changes: object) -> str:
    plan = {
        "version": 2,
        "job": "gpt",
        "name": "x",
        "steps": 5,
        "settings": {"nodes": 2},
        "faults": [],
    }
    return json.dumps(plan | changes)


_FILES: dict[str, str | bytes] = {
    "train.py": _SCRIPT,
    "empty.py": "",
    "syntax.py": "def train(trainer:\n",
    "binary.py": b"\xff\xfe\x00",
    "async.py": "async def train(trainer): ...\n",
    "no_arguments.py": "def train(): ...\n",
    "needs.py": _SCRIPT.replace("*, steps: int = 5", "*, size: int, steps: int = 5"),
    "plain.py": _SCRIPT.replace("*, steps: int = 5", "steps=5, lr=0.1"),
    "no_loss.py": "def train(trainer): print(1)\n",
    "file": "x",
    "damaged.json": '{"version": 2, "job": ',
    "list.json": "[]",
    "version9.json": '{"version": 9}',
    "latin.json": b"\xff\xfe",
    "unknown_fault.json": _plan(faults=[{"kind": "Explode"}]),
    "misspelt_fault.json": _plan(faults=[{"kind": "KilNode"}]),
    "misspelt_field.json": _plan(faults=[{"kind": "Kill", "rank": 1, "at_stpe": 2}]),
    "misspelt_setting.json": _plan(settings={"noeds": 2}),
    "misspelt.yaml": "- name: a\n  logPattern: 'step ([0-9]+)'\n  logPatern: 'x'\n",
    "rank7.json": _plan(faults=[{"kind": "Kill", "rank": 7, "at_step": 2}]),
    "step_two.json": _plan(faults=[{"kind": "Kill", "rank": 1, "at_step": "two"}]),
    "no_list.json": _plan(faults="Kill"),
    "no_job.json": _plan(job=""),
    "no_setting.json": _plan(settings={"nodez": 2}),
    "old_setting.json": _plan(settings={"strike_window_s": 2}),
    "negative.json": _plan(steps=-5),
    "truncated/a/outcome.json": '{"x":',
    "old/a/outcome.json": '{"version":0}',
    "run/journal/coordinator.jsonl": b'\xff\xfenotjson\n{"t\n',
    "control/control.json": "{",
    "blank/control.json": "",
    "pattern.yaml": "- name: a\n  logPattern: 'step ([0-9]+'\n",
    "braces.yaml": "{{{",
    "number.yaml": "- 5\n",
    "no_rules.yaml": "[]",
    "zero.yaml": b"\xff\xfe\x00",
    "rules.yaml": "- name: Hang\n  logPattern: 'step ([0-9]+)'\n  expectedRecurringFrequencyInSeconds: 10\n",
    "log.txt": "2026-01-01 00:00:00 step 1\n2026-01-01 00:00:01 step 2\n",
    "no_times.txt": "hello\n",
    "policy.yaml": "minReplicas: 4\nmaxReplicas: 2\n",
    "no_yaml.yaml": ":\n- x{",
    "no_policy.yaml": "foo: 1\n",
    "snapshots/step-000000010.g0/manifest.json": "{",
    "directory/x": "",
}

#: Command line, what stderr begins with, and what else it says.
_CASES = """
launch                                               | SCRIPT: it is missing
launch nojob                                         | SCRIPT nojob: name a reference job
launch nojob.py                                      | SCRIPT nojob.py: name a Python file that exists
launch ''                                            | SCRIPT: give it a value
launch 'a b.py'                                      | SCRIPT 'a b.py': name a Python file
launch gpt:                                          | SCRIPT gpt:: name a function behind the colon
launch directory                                     | SCRIPT directory: name a reference job
launch train.py:missing                              | SCRIPT % define a function missing(trainer, ...)
launch empty.py                                      | SCRIPT % define a function train(trainer, ...)
launch syntax.py                                     | SCRIPT % correct the syntax error in line 1
launch binary.py                                     | SCRIPT % name a Python file that can be read
launch async.py                                      | SCRIPT % define train without async
launch no_arguments.py                               | SCRIPT % let train take the trainer
launch no_loss.py                                    | SCRIPT % call step.backward(loss)
launch gpt more                                      | command: got unexpected extra argument
launch gpt --bogus                                   | --bogus: there is no such option
launch gpt --node 3                                  | --node: there is no such option, write --nodes
launch gpt --nodes 0                                 | --nodes 0: use 1 or more
launch gpt --nodes=-1                                | --nodes=-1: use 1 or more
launch gpt --nodes 2.5                               | --nodes 2.5: use a valid integer; see chaoskit launch --help
launch gpt --nodes 1000000                           | --nodes 1000000: use at most 1024
launch gpt --spares -1                               | --spares -1: use 0 or more
launch gpt --min-world 9                             | --min-world 9: use at most nodes=4
launch gpt --shards 2                                | --shards 2: use at least nodes=4
launch gpt --seed 99999999999999999999               | --seed 99999999999999999999: use a number that has 64 bits
launch gpt --seed -1                                 | --seed -1: use 0 or more
launch gpt --device tpu                              | --device tpu: use one of cpu, cuda
launch gpt --reduction none                          | --reduction none: use one of exact, fast
launch gpt --health perhaps                          | --health perhaps: use one of enforce, report, off
launch gpt --set                                     | --set: requires an argument
launch gpt --set x                                   | --set x: write key=value
launch gpt --set =3                                  | --set =3: write key=value
launch gpt --set nosuch=1                            | --set nosuch=1: train takes batch
launch train.py --set steps=many                     | --set steps=many: use a value of type int
launch gpt --setting nodes                           | --setting nodes: write NAME=VALUE
launch gpt --setting job=x                           | --setting job=x: there is no such setting
launch gpt --setting hang_stepz=3                    | --setting hang_stepz=3: there is no such setting; write hang
launch gpt --setting hang_steps=NaN                  | --setting hang_steps=NaN: use a finite number
launch gpt --setting startup_s=Infinity              | --setting startup_s=Infinity: use a finite number
launch gpt --setting hang_steps=soon                 | --setting hang_steps=soon: use a value of type float
launch gpt --setting hang_steps=0                    | --setting hang_steps=0: use 1 or more
launch gpt --setting heartbeat_ms=0.5                | --setting heartbeat_ms=0.5: use a value of type int
launch gpt --setting collective_timeout_s=0.1        | --setting collective_timeout_s=0.1: use more than
launch gpt --setting transport=pigeon                | --setting transport=pigeon: use one of auto, tcp
launch gpt --setting fork=maybe                      | --setting fork=maybe: use a value of type bool
launch gpt --checkpoints ''                          | --checkpoints '': give it a value, or leave it out
launch gpt --checkpoints=                            | --checkpoints=: give it a value, or leave it out
launch gpt --report ''                               | --report '': give it a value, or leave it out
launch gpt --rules ''                                | --rules '': give it a value, or leave it out
launch gpt --remote ''                               | --remote '': give it a value, or leave it out
launch gpt --elastic ''                              | --elastic '': give it a value, or leave it out
report ''                                            | DIRECTORY: give it a value
judge ''                                             | RUN_DIR: give it a value
trace run --file ''                                  | --file '': give it a value, or leave it out
sla lint ''                                          | FILE: give it a value
launch gpt --setting quarantined=5                   | --setting quarantined=5: use a value of type list of str
launch gpt --setting disk={}                         | disk.target: it is missing
launch gpt --setting disk.keep=3                     | --setting disk.keep=3: use one of target
launch gpt --setting follow.rule=cubic               | --setting follow.rule=cubic: use one of linear
launch gpt --setting rules=missing.yaml              | --setting rules=missing.yaml: name a file that can be read
launch gpt --nodes 3 --setting nodes=3               | --setting nodes=3: leave it out: --nodes gives this setting
launch gpt --checkpoints c --setting disk.keep_last=-1 | --setting disk.keep_last=-1: use 0 or more
launch gpt --checkpoints /proc/nowhere               | --checkpoints /proc/nowhere: choose a directory
launch gpt --checkpoints file                        | --checkpoints file: choose a directory
launch gpt --checkpoints c --keep -3                 | --keep -3: use 0 or more
launch gpt --checkpoints c --checkpoint-every 0      | --checkpoint-every 0: use 1 or more
launch gpt --checkpoints c --checkpoint-every-s nan  | --checkpoint-every-s nan: use a finite number
launch gpt --checkpoints c --checkpoint-every-s inf  | --checkpoint-every-s inf: use a finite number
launch gpt --remote s3://bucket                      | --remote s3://bucket: give a disk tier
launch gpt --remote nowhere --checkpoints c          | --remote nowhere: write PROTOCOL://PLACE
launch gpt --remote s3:// --checkpoints c            | --remote s3://: write PROTOCOL://PLACE
launch gpt --remote pigeon://x/y --checkpoints c     | --remote pigeon://x/y: use a protocol that fsspec knows
launch gpt --remote file:///tmp/r --remote-every -1 --checkpoints c | --remote-every -1: use 0 or more
launch gpt --elastic 2                               | --elastic 2: write MIN..MAX
launch gpt --elastic 5..2                            | --elastic 5..2: maxReplicas=2
launch gpt --elastic 0..3                            | --elastic 0..3: minReplicas=0
launch gpt --elastic 6..8                            | --nodes 4: start with a size that the elastic policy allows
launch gpt --elastic missing.yaml                    | --elastic missing.yaml: write MIN..MAX
launch gpt --elastic policy.yaml                     | --elastic policy.yaml: maxReplicas=2
launch gpt --elastic no_yaml.yaml                    | --elastic no_yaml.yaml: % write YAML or JSON
launch gpt --elastic no_policy.yaml                  | --elastic no_policy.yaml: foo=1
launch gpt --elastic directory                       | --elastic directory: write MIN..MAX
launch gpt --keep 3                                  | --keep 3: give --checkpoints, too
launch gpt --remote-every 5 --checkpoints c          | --remote-every 5: give --remote, too
launch gpt --spares 2000                             | --spares 2000: use at most 1024
launch gpt --checkpoints c --keep 3 --setting disk.keep_last=5 | --setting disk.keep_last=5: leave it out
launch gpt --elastic 2..8 --setting elastic.minReplicas=9 | % use
launch needs.py                                      | options.size: give this option a value (--set size=VALUE;
launch plain.py --set lr=0,05                        | --set lr=0,05: use a number, as its default 0.1 is one
launch train.py --nodes 2 --set nodes=x              | --set nodes=x: train takes steps: leave nodes out, or give
launch gpt --follow cubic                            | --follow cubic: use one of linear
launch gpt --follow-warmup-steps 3                   | --follow-warmup-steps 3: give --follow, too
launch gpt --follow linear --follow-warmup-steps -3  | --follow-warmup-steps -3: use 0 or more
launch gpt --rules missing.yaml                      | --rules missing.yaml: name a file that can be read
launch gpt --rules braces.yaml                       | --rules braces.yaml: mend it
launch gpt --rules number.yaml                       | --rules number.yaml: write a list of rules
launch gpt --rules zero.yaml                         | --rules zero.yaml: mend it
launch gpt --rules directory                         | --rules directory: name a file that can be read
launch gpt --rules pattern.yaml                      | % correct the regular expression
launch gpt --port -1                                 | --port -1: choose a port
launch gpt --port 70000                              | --port 70000: choose a port
launch gpt --control-port 70000                      | --control-port 70000: choose a port
launch gpt --metrics-port 70000                      | --metrics-port 70000: choose a port
launch gpt --otlp-endpoint nowhere                   | --otlp-endpoint nowhere: write the address
launch gpt --substrate moon                          | --substrate moon: use one of local, netns, docker
launch gpt --report /proc/nowhere                    | --report /proc/nowhere: choose a directory
launch gpt --report file                             | --report file: choose a directory
launch gpt --report run                              | --report run: choose another directory
demo --report /proc/nowhere                          | --report /proc/nowhere: choose a directory
demo --report file                                   | --report file: choose a directory
demo --quick=5                                       | --quick=5: does not take a value
demo more                                            | command: got unexpected extra argument
test                                                 | SUITE: it is missing
test nosuch                                          | SUITE nosuch: name one of canary
test nosuch.py                                       | SUITE nosuch.py: name one of
test smoke --repeats 0                               | --repeats 0: use 1 or more
test smoke --seed x                                  | --seed x: use a valid integer
test smoke --report file                             | --report file: choose a directory
replay                                               | PLAN: it is missing
replay missing.json                                  | PLAN missing.json: name a plan file that can be read
replay directory                                     | PLAN directory: name a plan file that can be read
replay damaged.json                                  | PLAN damaged.json: write one JSON object (Expecting value
replay latin.json                                    | PLAN latin.json: write one JSON object
replay list.json                                     | PLAN list.json: write one JSON object
replay version9.json                                 | version=9: in version9.json, use a plan of version 2
replay --history missing 01a21db3                    | --history missing: name a store that has records
history list missing                                 | STORE missing: name a store that has records
history list list.json                               | STORE list.json: name a file of records
history show list.json                               | STORE list.json: name a file of records
history add new missing                              | history='missing': name a file that can be read
history export list.json --format xml                | --format xml: use one of jsonl, csv
history prune missing --older-than-days 3            | STORE missing: name a history
history prune missing --older-than-days 0            | --older-than-days 0: use a value greater than
sla lint missing.yaml                                | FILE missing.yaml: name a file that can be read
sla lint list.json                                   | FILE list.json: correct the file
sla check list.json missing                          | FILE list.json: correct the file
sla export list.json                                 | FILE list.json: correct the file
replay unknown_fault.json                            | % use one of Kill
replay rank7.json                                    | rank=7: in rank7.json, use a rank from 0 to 1
replay step_two.json                                 | faults[0].at_step='two': in step_two.json
replay no_list.json                                  | faults='Kill': in no_list.json
replay no_job.json                                   | job: in no_job.json, give either a job or a command
replay no_setting.json                               | settings.nodez=2: in no_setting.json
replay old_setting.json                              | settings.strike_window_s=2: in old_setting.json
replay negative.json                                 | steps=-5: in negative.json, use 1 or more
replay version9.json --times 0                       | --times 0: use 1 or more
replay version9.json --shrink --times 3              | --times 3: leave it out
replay version9.json --shrink --budget-s nan         | --budget-s nan: use a number of seconds above 0
report                                               | DIRECTORY: it is missing
report nowhere                                       | DIRECTORY nowhere: name a directory
report directory                                     | DIRECTORY directory: name a directory
report file                                          | DIRECTORY file: name a directory
report truncated                                     | outcome='truncated/a/outcome.json'
report old                                           | outcome='old/a/outcome.json'
faults Explode                                       | NAME Explode: use one of Kill
faults ''                                            | NAME: give it a value, or leave it out
faults Kill Hang                                     | command: got unexpected extra argument
faults --markdown                                    | --markdown: there is no such option
top                                                  | RUN_DIR: name the directory of a run
top nowhere                                          | RUN_DIR nowhere: name the directory of a run
top file                                             | RUN_DIR file: name the directory of a run
top run --minutes 0                                  | --minutes 0: use a value greater than or equal to 0.1
trace                                                | --otlp-endpoint: name a receiver, or give --file
trace run --file out.json                            | RUN_DIR run: name a run of this version
trace run --otlp-endpoint nowhere                    | --otlp-endpoint nowhere: write the address
scale                                                | SIZE: it is missing
scale two                                            | SIZE: use a valid integer
scale 4                                              | --run chaoskit-runs: no run listens there
scale 4 --run nowhere                                | --run nowhere: name the directory of a run
scale 4 --run file                                   | --run file: name the directory of a run
scale 4 --run control                                | --run control
scale 4 --run blank                                  | --run blank
scale 4 --wait-s nan                                 | --wait-s nan: use a number of seconds, 0 or more
node                                                 | command: it is missing; see chaoskit node --help
node bogus                                           | command bogus: no such command; see chaoskit node --help
node check --only soul                               | --only soul: write one of gpu
node check --limit x                                 | --limit x: write NAME=VALUE
node check --limit x=1                               | --limit x=1: write NAME=VALUE
node check --limit gpus_expected=nan                 | --limit gpus_expected=nan: write gpus_expected=VALUE
node check --against x                               | --against x: write HOST:PORT
node check --against x:99999                         | --against x:99999: write HOST:PORT
node serve-check --port 99999                        | --host 127.0.0.1:99999
node cordon                                          | NODE: it is missing
node cordon node3                                    | --reason: it is missing
node cordon '' --reason x                            | NODE: give it a value
node cordon node3 --reason ''                        | --reason '': give it a value
node uncordon node9 --reason x                       | NODE node9: name a node
node drain node1                                     | --grace-s: give either --grace-s or --cancel
node drain node1 --grace-s 5 --cancel                | --grace-s 5: give either
node drain node1 --grace-s 5 --run nowhere           | --run nowhere: name the directory of a run
checkpoint                                           | command: it is missing
checkpoint list nowhere                              | DIRECTORY nowhere: name a directory of snapshots
checkpoint list file                                 | DIRECTORY file: name a directory of snapshots
checkpoint list pigeon://x/y                         | DIRECTORY pigeon://x/y: use a protocol that fsspec knows
checkpoint list s3://x --endpoint nowhere            | --endpoint nowhere: write http://HOST:PORT
checkpoint list directory --endpoint http://x        | --endpoint http://x: leave it out
checkpoint verify snapshots --step 99                | --step 99: use one of
checkpoint verify snapshots --step x                 | --step x: use a valid integer
checkpoint restore-drill nowhere                     | DIRECTORY nowhere: name a directory of snapshots
checkpoint prune directory --keep-last -1            | --keep-last -1: use 0 or more
checkpoint prune directory --keep-every -1           | --keep-every -1: use 0 or more
checkpoint prune directory --budget-gb -1            | --budget-gb -1: use 0 or more
checkpoint prune directory --budget-gb nan           | --budget-gb nan: use 0 or more, and a finite number
rules                                                | command: it is missing
rules lint                                           | command lint: no such command; see chaoskit rules --help
rules test missing log.txt                           | RULES missing: name a file that can be read
rules test no_rules.yaml log.txt                     | RULES no_rules.yaml: write a list of rules
rules test pattern.yaml log.txt                      | % correct the regular expression
rules test rules.yaml missing                        | LOG missing: name a file that can be read
rules test rules.yaml directory                      | LOG directory: name a file that can be read
rules test rules.yaml no_times.txt                   | % record lines with ISO 8601
rules test rules.yaml log.txt --period-s nan         | --period-s nan: use 0 or more seconds
rules test rules.yaml log.txt --tail-s inf           | --tail-s inf: use 0 or more seconds
rules test rules.yaml log.txt --expect Hang:soon     | --expect Hang:soon: write NAME:VERDICT
doctor more                                          | command: got unexpected extra argument
cleanup --bogus                                      | --bogus: there is no such option
launch gtp                                           | SCRIPT gtp: write gpt
launch resnte                                        | SCRIPT resnte: write resnet
launch trian.py                                      | SCRIPT trian.py: write train.py
launch trian                                         | SCRIPT trian: write train
launch gpt:trian                                     | SCRIPT % write train: define a function trian(trainer, ...) in it
launch gpt --set stpes=3                             | --set stpes=3: write steps; train takes batch
launch gpt --setting HANG-STEPS=3                    | --setting HANG-STEPS=3: there is no such setting; write hang
launch gpt --substrate netsn                         | --substrate netsn: write netns
test somke                                           | SUITE somke: write smoke
replay misspelt_fault.json                           | % write KillNode; chaoskit faults lists all
replay misspelt_field.json                           | % write at_step
replay misspelt_setting.json                         | % write nodes
faults Kil                                           | NAME Kil: write Kill; chaoskit faults lists all
faults kill_node                                     | NAME kill_node: write KillNode
faults outofmem                                      | NAME outofmem: write OutOfMemory
node chek                                            | command chek: no such command; write chaoskit node check; see
history shw x                                        | command shw: no such command; write chaoskit history show; see
node check --only gpuu                               | --only gpuu: write gpu
node check --limit edac_corected_warn=1              | --limit edac_corected_warn=1: write edac_corrected_warn=VALUE
accept x y --reason z --until 2999-01-01 --number recovry | --number recovry: write recovery
rules test rules.yaml log.txt --expect Hagn:hanging  | --expect Hagn:hanging: write Hang:VERDICT
rules test misspelt.yaml log.txt                     | % write logPattern
lunch                                                | command lunch: no such command; write chaoskit launch
run smoke                                            | command run: no such command; write chaoskit test
--bogus                                              | --bogus: there is no such option; see chaoskit --help
"""


def _cases() -> list[tuple[str, str]]:
    lines = (line for line in _CASES.splitlines() if line)
    return [
        (typed.strip(), says.strip())
        for typed, _, says in (line.partition(" | ") for line in lines)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with files that are damaged in many ways."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in _FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.mark.parametrize(("typed", "says"), _cases(), ids=[typed for typed, _ in _cases()])
def test_one_line_names_what_was_typed(
    typed: str,
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    before = {path for path in folder.iterdir() if path.name != "state"}
    status = run(shlex.split(typed))
    errors = capfd.readouterr().err
    assert status == 2, errors
    assert errors.count("\n") == 1, errors
    start, _, end = says.partition("%")
    assert errors.startswith(f"chaoskit: {start}"), errors
    assert end.strip() in errors
    assert {path for path in folder.iterdir() if path.name != "state"} == before, (
        "something was written"
    )


# -- in tests --------------------------------------------------------------------------------------

#: Arguments of the marker, and what the line says.
_MARKERS = {
    "nodes=0": "nodes=0: use 1 or more",
    "nodes='two'": "nodes='two': use a value of type int",
    "nodes=2.5": "nodes=2.5: use a value of type int",
    "node=3": "setting='node': there is no such setting; write nodes",
    "spares=-1": "spares=-1: use 0 or more",
    "min_world=9": "min_world=9: use at most nodes=4",
    "shards=2": "shards=2: use at least nodes=4",
    "seed='x'": "seed='x': use a value of type int",
    "steps=0": "steps=0: use 1 or more",
    "until={'world': 3}": "until={'world': 3}: give steps, too",
    "deadline_s=-1": "deadline_s=-1: use a number of seconds above 0",
    "deadline_s=float('nan')": "deadline_s=nan: use a number of seconds above 0",
    "max_lost_steps=-1": "max_lost_steps=-1: use a number of steps, 0 or more",
    "hang_steps=float('nan')": "hang_steps=nan: use a finite number",
    "hang_floor_ms=0": "hang_floor_ms=0: use 1 or more",
    "reduction='none'": "reduction='none': use one of exact, fast",
    "options={'nope': 1}": "options.nope=1: train takes",
    "disk={'target': 'relative'}": "disk='relative': name a directory by its absolute path",
    "disk={'target': '/proc/nowhere'}": "disk='/proc/nowhere': choose a directory that can be written",
    "disk={'keep': 3}": "disk.keep=3: use one of target",
    "remote={'target': 's3://x'}": "remote='s3://x': give a disk tier",
    "elastic=5": "elastic=5: use a value of type ElasticPolicy or None",
    "rules='missing.yaml'": "rules='missing.yaml': name a file that can be read",
    "quarantined=['No Node']": "quarantined",
    "job='missing.py'": "job='missing.py': name a Python file that exists",
    "faults=[Kill(rank=9, at_step=3)]": "rank=9: use a rank from 0 to 3",
    "faults=[Kill(rank=1, at_step=99)], steps=10": "at_step=99",
    "faults=[NaN(rank=1, at_step=-1)]": "at_step=-1",
    "fault=[Kill(rank=1, at_step=3)]": "setting='fault': there is no such setting; write faults",
    "optoins={'lr': 1}": "setting='optoins': there is no such setting; write options",
    "deadline=60": "setting='deadline': there is no such setting; write deadline_s",
    "chek=False": "setting='chek': there is no such setting; write check",
    "faults=[Kill(rank=1, step=3)]": "Kill.step=3: write at_step",
    "faults=[Kill(worker=1, at_step=3)]": "Kill.worker=1: use one of rank, node, at_step, phase, after_s, during",
    "faults=[Kill(node=1, at_step=3)]": "node=1: use a value of type str",
    "faults=[Kill(1, 3)]": "Kill=(1, 3): give each value a name, such as rank=1",
    "faults=[Delay(rank=1, at_step=3, delay_ms=5.0)]": "mark the test with @pytest.mark.chaos(substrate='netns')",
    "command=['true'], fault=[]": "fault=[]: a command has no such setting; write faults",
    "command=['true'], steps=3": "steps=3: a command has no such setting; use one of command, watch",
    "command=['true', '--out={rundir}'], watch=WATCH": "command='--out={rundir}': write {run_dir}",
    "command=['true', '{master-port}'], watch=WATCH": "command='{master-port}': write {master_port}",
}


def test_a_test_fails_with_one_line(pytester: pytest.Pytester) -> None:
    """All markers stand in one file, and every test of it fails before anything is started."""
    tests = ["from chaoskit import LogPatterns", "from faults import Delay, Kill, NaN"]
    tests += [r"WATCH = LogPatterns(step=r'step (\d+)')"]
    for number, arguments in enumerate(_MARKERS):
        job = "**{}" if "job=" in arguments or "command=" in arguments else "job='gpt'"
        tests += [f"def test_{number:02}(chaos):", f"    chaos.run({job}, {arguments})"]
    pytester.makepyfile("\n".join(tests))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--tb=short")
    assert done.ret == 2
    output = done.stdout.str()
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("bad input: ")]
    assert len(lines) == len(_MARKERS), output
    missed = [
        (line, says)
        for line, says in zip(lines, _MARKERS.values(), strict=True)
        if says not in line
    ]
    assert missed == []
    places = [
        f"(test_a_test_fails_with_one_line.py:{5 + 2 * number})" for number in range(len(_MARKERS))
    ]
    assert [line.rpartition(" ")[2] for line in lines] == places


@pytest.mark.parametrize(
    ("arguments", "ini", "says"),
    [
        (
            ["--chaos-substrate", "moon"],
            "",
            "chaos_substrate='moon': use one of local, netns, docker, kubernetes, or",
        ),
        (["--chaos-report", ""], "", "--chaos-report='': give it a value, or leave it out"),
        (["--chaos-save", ""], "", "--chaos-save='': give it a value, or leave it out"),
        (["--chaos-seed", "x"], "", "argument --chaos-seed: invalid int value: 'x'"),
        (["--chaos-repeats", "0"], "", "chaos_repeats=0: use 1 or more"),
        (
            ["--chaos-report", "/proc/nowhere"],
            "",
            "chaos_report='/proc/nowhere': choose a directory",
        ),
        ([], "chaos_seed = x", "chaos_seed and chaos_repeats must be whole numbers"),
        ([], "chaos_detection = keen", "chaos_detection='keen': use one of production, relaxed"),
        ([], "chaos_substrate = moon", "chaos_substrate='moon': use one of local"),
        ([], "chaos_report = /proc/nowhere", "choose a directory that can be written"),
    ],
)
def test_an_option_of_pytest_is_refused(
    pytester: pytest.Pytester, arguments: list[str], ini: str, says: str
) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makeini(f"[pytest]\n{ini}\n")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    output = done.stdout.str() + done.stderr.str()
    assert says in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("repeats=0", "repeats=0: use a whole number, 1 or more"),
        ("repeats='x'", "repeats='x': use a value of type int"),
        ("repeats=True", "repeats=True: use a value of type int"),
        ("definition=1.5", "definition=1.5: use a value of type int"),
        ("substrate=5", "substrate=5: use a value of type str"),
        ("detection=[]", "detection=[]: use a value of type str"),
        ("2", "chaos=2: give each value a name"),
        ("substrate='moon'", "substrate='moon': use one of local, netns, docker"),
        ("detection='keen'", "detection='keen': use one of production, relaxed"),
    ],
)
def test_a_marker_is_refused_at_collection(
    pytester: pytest.Pytester, marker: str, says: str
) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.chaos({marker})\ndef test_nothing(chaos): pass"
    )
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert done.ret == 2
    assert f"marker chaos: {says}" in done.stdout.str()
    assert "Traceback" not in done.stdout.str()
