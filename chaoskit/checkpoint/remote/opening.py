"""From a URL to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaoskit.checkpoint.remote.local import LocalStore
from chaoskit.checkpoint.remote.s3 import S3Store
from chaoskit.checkpoint.remote.store import Store, Traffic
from chaoskit.errors import BadInput

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_KINDS: dict[str, type[Store]] = {"s3": S3Store, "s3a": S3Store, "file": LocalStore, "local": LocalStore}
_CONNECT_S = 5.0


def open_store(url: str, storage_options: Mapping[str, Any] | None = None, traffic: Traffic | None = None) -> Store:
    """The store below a URL such as ``s3://bucket/run``, ``gs://bucket/run``, ``file:///mnt/run``, ``memory://run``.

    Nothing is asked of it yet. To be called in the process that uses it: it does not survive a fork.

    Args:
        storage_options: what fsspec's file system takes: credentials, endpoint, and so on.

    Raises:
        BadInput: if the URL is none, or what it takes is not installed.
    """
    traffic = traffic or Traffic()
    protocol, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        raise BadInput("url", url, "write PROTOCOL://PLACE, such as s3://bucket/run or file:///mnt/run")
    try:
        import fsspec
    except ImportError:
        raise BadInput("url", url, "pip install 'chaoskit[s3]'") from None
    options = _with_defaults(protocol, dict(storage_options or {}), traffic)
    try:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise BadInput("url", url, f"pip install 'chaoskit[{extra}]'" if extra else str(error)) from None
    except (ValueError, TypeError) as error:
        raise BadInput("url", url, f"correct it, or storage_options: {error}") from None
    return _KINDS.get(protocol, Store)(fs, root, url, traffic)


def _with_defaults(protocol: str, options: dict[str, Any], traffic: Traffic) -> dict[str, Any]:
    """Options under which one attempt is one attempt, and nothing is checked twice; the user's own come first."""
    if _KINDS.get(protocol) is LocalStore:
        return {"auto_mkdir": True} | options
    if _KINDS.get(protocol) is not S3Store:
        return options
    config = {
        "connect_timeout": min(_CONNECT_S, traffic.request_timeout_s),
        "read_timeout": traffic.request_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": max(10, traffic.parallel + 2),
        "request_checksum_calculation": "when_required",  # every body goes with its MD5
        "response_checksum_validation": "when_required",  # every chunk is checked against the manifest
    }
    return options | {"config_kwargs": config | options.get("config_kwargs", {})}
