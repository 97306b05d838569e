"""``python -m chaoskit.substrate.undo``: run the janitor, even where nothing but Python works."""

from __future__ import annotations

import sys

from chaoskit.substrate.undo import any_left, describe, sweep

if __name__ == "__main__":
    repairs = sweep()
    for line in map(describe, repairs):
        sys.stdout.write(f"{line}\n")
    sys.exit(any_left(repairs))
