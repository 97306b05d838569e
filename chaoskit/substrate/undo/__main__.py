"""``python -m chaoskit.substrate.undo``: the janitor, where nothing but Python works."""

from __future__ import annotations

import sys

from chaoskit.substrate.undo import describe, sweep

if __name__ == "__main__":
    for line in map(describe, sweep()):
        sys.stdout.write(f"{line}\n")
