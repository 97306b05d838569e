"""Webhook of a night. A failing or slow webhook changes nothing.

-> nightly/plan.py: when it is called. nightly/outcome.py: the sentence that is posted.
"""

from __future__ import annotations

import json
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path

from chaoskit.history.record import NightRecord
from chaoskit.nightly.outcome import night_sentence
from chaoskit.nightly.plan import Webhook

_PATIENCE_S = 10.0


def post(webhook: Webhook, night: NightRecord, before: NightRecord | None) -> str:
    """Post the result if the plan asks for it.

    Return a line about an error, which does not contain the URL, or "". Errors are a URL that
    cannot be read, and a server that refuses the result or does not answer within 10 s.

    Args:
        before: the night before this one, for ``when: change``.
    """
    is_changed = before is None or before.exit_code != night.exit_code
    if (webhook.when == "bad" and not night.exit_code) or (
        webhook.when == "change" and not is_changed
    ):
        return ""
    try:
        url = _url(webhook.url_from)
    except (OSError, ValueError) as error:
        return f"the webhook was not called: {error}"
    text = f"{night.name}: {night_sentence(night)}"
    payload = {
        "text": text,
        "name": night.name,
        "exit_code": night.exit_code,
        "commit": night.commit,
    }
    request = urllib.request.Request(
        url,
        data=json.dumps(payload).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            answer.read(1)
    except (OSError, ValueError, HTTPException) as error:
        return f"the webhook has failed: {type(error).__name__}"  # its text may contain the URL
    return ""


def _url(source: str) -> str:
    """Return the URL in an environment variable or file. Raise ValueError if it contains none."""
    kind, _, name = source.partition(":")
    url = os.environ.get(name, "") if kind == "env" else Path(name).read_text(encoding="utf-8")
    if not url.strip().startswith(("https://", "http://")):
        raise ValueError(f"{source} contains no URL")
    return url.strip()
