"""A small user repository, with a job of which a test kills a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

JOB = """
import time
import torch
from torch import nn
from pauses import IN_FIRST_STEP_S

DATA = torch.rand(48, 4, generator=torch.Generator().manual_seed(5))

def train(trainer, *, steps):
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            time.sleep(0.01)
            for shard in step.shards(DATA, batch_size=24):
                if trainer.step == 6 and not trainer.worker.endswith(".0"):
                    time.sleep(IN_FIRST_STEP_S)  # of the worker that takes another one's place
                step.backward(model(shard.batch).square().mean())
"""
TESTS = """
from faults import Kill

def test_kill(chaos):
    chaos.run("train.py", nodes=2, steps=10, faults=[Kill(rank=1, at_step=6)], twin=False)

def test_plain():
    pass
"""
#: Tests for nights: a control, and experiments that take some seconds each.
CALM = """
def test_calm(chaos):
    chaos.run("train.py", nodes=2, steps=6, twin=False)
"""
KILLS = """
from faults import Kill
import pytest

@pytest.mark.parametrize("at", [4, 6, 7])
def test_kill(chaos, at):
    chaos.run("train.py", nodes=2, steps=10, faults=[Kill(rank=1, at_step=at)], twin=False)
"""


class Project:
    """A repository with a test that kills a rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch", "main")
        self.write(**{"train.py": JOB, "pauses.py": "IN_FIRST_STEP_S = 0.0\n", "test_it.py": TESTS})
        self.write(
            **{
                "pytest.ini": "[pytest]\nchaos_detection = relaxed\n",
                ".gitignore": "__pycache__\ndata\n",
            }
        )
        self.commit()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(textwrap.dedent(text))

    def git(self, *arguments: str) -> str:
        author = ("-c", "user.name=a test", "-c", "user.email=a@test")
        command = ["git", "-C", str(self.path), *author, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")
        return self.git("rev-parse", "HEAD")

    def compare(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "chaoskit", "compare", *arguments],
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )

    def findings(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        done = self.compare(*arguments, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)["findings"]
