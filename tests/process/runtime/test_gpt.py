"""Tests of the reference job: its model, its data, and its learning."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from chaoskit.errors import BadInput
from chaoskit.fixtures.jobs.corpus import ByteDataset, corpus_file
from chaoskit.fixtures.jobs.gpt import SIZES, build, choose, warmup_cosine
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss

CREATE = """
import sys
from dataclasses import replace
from pathlib import Path
from chaoskit.fixtures.jobs.corpus import corpus_file
print("ready", flush=True)
sys.stdin.readline()
print(corpus_file(int(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("size", "least", "most"), [("tiny", 50_000, 100_000), ("10m", 9_500_000, 10_800_000)]
)
def test_a_size_has_the_parameters_it_is_named_after(size: str, least: int, most: int) -> None:
    model = build(SIZES[size], dropout=0.1)
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most
    assert model.head.weight is not model.embedding.weight


def test_the_seed_alone_decides_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat(
            [parameter.detach().flatten() for parameter in build(SIZES["tiny"], 0.1).parameters()]
        )

    first = weights(3)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


def test_no_position_sees_a_later_byte() -> None:
    shape = SIZES["tiny"]
    model = build(shape, dropout=0.0)
    tokens = torch.randint(256, (2, shape.context))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    logits, others = model(tokens), model(changed)
    torch.testing.assert_close(logits[:, :20], others[:, :20])
    assert not torch.allclose(logits[:, 20:], others[:, 20:])


def test_dropout_follows_the_generator() -> None:
    shape = SIZES["tiny"]
    model = build(shape, dropout=0.1)
    windows = torch.randint(256, (2, shape.context + 1))

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next_byte_loss(model, windows)

    assert torch.equal(loss(1), loss(1))
    assert not torch.equal(loss(1), loss(2))


def test_the_model_learns(tmp_path: Path) -> None:
    shape, steps = SIZES["tiny"], 40
    dataset = ByteDataset(corpus_file(shape.corpus_bytes, tmp_path), shape.context)
    torch.manual_seed(0)
    model = build(shape, dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, warmup_cosine(steps))
    losses = []
    for step in range(steps):
        loss = next_byte_loss(
            model, dataset.__getitems__(list(range(step * shape.batch, (step + 1) * shape.batch)))
        )
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_learning_rate_rises_then_falls() -> None:
    factors = [warmup_cosine(60)(step) for step in range(61)]
    assert factors[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert factors[6:] == sorted(factors[6:], reverse=True)
    assert factors[60] == pytest.approx(0.1)
    assert warmup_cosine(1)(0) == 1.0


def test_a_corpus_is_the_same_text_wherever_it_lies(tmp_path: Path) -> None:
    first, second = corpus_file(100_000, tmp_path / "a"), corpus_file(100_000, tmp_path / "b")
    text = first.read_bytes()
    assert len(text) == 100_000
    assert text == second.read_bytes()
    assert corpus_file(200_000, tmp_path / "a").read_bytes().startswith(text)


def test_a_corpus_is_written_once(tmp_path: Path) -> None:
    before = corpus_file(10_000, tmp_path).stat()
    after = corpus_file(10_000, tmp_path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_corpus_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpus_file(1_000).parent == tmp_path / "chaoskit"


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(BadInput, match="choose a directory that can be written"):
        corpus_file(1_000, in_the_way / "cache")


def test_processes_that_create_a_corpus_at_once_never_show_half_of_it(tmp_path: Path) -> None:
    size = 1 << 22
    expected = corpus_file(size, tmp_path / "expected").read_bytes()
    contended = tmp_path / "contended"
    creators = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, str(size), str(contended)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(3)
    ]
    for creator in creators:
        assert creator.stdout is not None
        assert creator.stdout.readline() == "ready\n"
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("go\n")
        creator.stdin.flush()
    sizes = set()
    while any(creator.poll() is None for creator in creators):
        sizes |= {file.stat().st_size for file in contended.glob("*.bin")}
    paths = {creator.communicate()[0].strip() for creator in creators}
    assert [creator.returncode for creator in creators] == [0, 0, 0]
    assert sizes <= {size}
    (path,) = contended.iterdir()
    assert paths == {str(path)}
    assert path.read_bytes() == expected


def test_windows_do_not_overlap_and_the_rest_is_left(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(23)))
    dataset = ByteDataset(path, context=4)
    assert len(dataset) == 4
    assert dataset[1].tolist() == [5, 6, 7, 8, 9]
    batch = dataset.__getitems__([3, 0])
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    with pytest.raises(IndexError):
        dataset[4]


def test_windows_reach_a_stock_data_loader(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(20)))
    loader = torch.utils.data.DataLoader(
        ByteDataset(path, context=4), batch_size=2, collate_fn=lambda batch: batch
    )
    assert [batch.shape for batch in loader] == [(2, 5), (2, 5)]


def test_a_corpus_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4))
    with pytest.raises(BadInput, match="at least 5 bytes"):
        ByteDataset(path, context=4)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="size='7b'"):
        choose("7b", steps=1)
    with pytest.raises(BadInput, match="steps=0"):
        choose("tiny", steps=0)
    with pytest.raises(BadInput, match="context=0"):
        choose("tiny", steps=1, context=0)


def test_batch_and_context_can_be_replaced() -> None:
    assert choose("tiny", steps=1) == SIZES["tiny"]
    assert choose("tiny", steps=1, batch=3, context=5) == replace(SIZES["tiny"], batch=3, context=5)
