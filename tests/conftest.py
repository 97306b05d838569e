"""What tests of several files need: an undo log, a real S3 server, and a proxy of ours before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chaoskit.fixtures.s3_server import S3Server
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip(
        "moto", reason="no S3 server here: pip install 'chaoskit[s3]' 'moto[server]'"
    )
    with S3Server() as server:
        yield server


@pytest.fixture
def undo(tmp_path: Path) -> Iterator[UndoLog]:
    """An undo log of the test's own, in the test's directory."""
    log = UndoLog(tmp_path)
    yield log
    log.close()


@pytest.fixture
def s3_proxy(s3_server: S3Server, undo: UndoLog) -> Iterator[ObjectProxy]:
    """Stands before the server; nothing is wrong with it yet."""
    proxy = ObjectProxy("127.0.0.1", s3_server.port, undo)
    yield proxy
    proxy.close()
