"""Fixtures that tests of several files share: an undo log, an S3 server, and a proxy before it."""

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
    """Return an undo log in the test's directory."""
    log = UndoLog(tmp_path)
    yield log
    log.close()


@pytest.fixture
def s3_proxy(s3_server: S3Server, undo: UndoLog) -> Iterator[ObjectProxy]:
    """Return a proxy before the S3 server, without any fault."""
    proxy = ObjectProxy("127.0.0.1", s3_server.port, undo)
    yield proxy
    proxy.close()
