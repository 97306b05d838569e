"""A training of one process that prints its steps in one of several common forms.

    python printed.py HOW STEPS STEP_S [ODD]

Its state is kept after each step in the directory of the run, and each new attempt goes on there.
The forms are:

* ``bar`` and ``bare``: a progress bar as tqdm draws it, with the loss or without.
* ``steady``: a line that each step draws over.
* ``epochs``: steps that begin again after every ten; ``uneven`` has half an epoch at the end, too.
* ``clock``: a line each tenth of a second.
* ``stalls``: a line a step, and one each half a second while one step takes two seconds.
* ``colours``, ``thousands``, ``abbreviated`` (1.0k): steps in other forms, the last two from step 985 on.
* ``endless``: no line feed. ``quiet``: nothing.
* ``loses``: a line per step, with the state kept after each tenth step, and the line ODD after every
  twelfth. The first attempt waits three seconds before step 17: a fault at step 15 may act late.
* ``loses-drawn``: like ``loses``, but each line draws over the one before.
* ``again``: a line per step. Rank 1 is another process; when it ends, the step is computed three times
  again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

BAR_S = 0.1  # tqdm's mininterval
#: Seconds before a step that takes long, by kind of log, first step of the attempt, and step.
PAUSES_S = {("stalls", 0, 5): 2.0, ("loses", 0, 17): 3.0}


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Bar:
    """A progress bar that draws as tqdm does.

    It draws at once, when an interval is over or a postfix is set, and at the end.
    """

    def __init__(self, total: int, at: int) -> None:
        self.total, self.at, self.postfix = total, at, ""
        self.draw()

    def draw(self) -> None:
        self.drawn_s = time.monotonic()
        share = self.at * 100 // self.total
        write(
            f"\rtrain: {share:3d}%|{'█' * (share // 10):10s}| {self.at}/{self.total} [00:01<00:02{self.postfix}]"
        )

    def update(self, loss: str) -> None:
        self.at += 1
        if time.monotonic() >= self.drawn_s + BAR_S:
            self.draw()
        if loss:
            self.postfix = f", loss={loss}"
            self.draw()

    def close(self) -> None:
        self.draw()
        write("\n")


def by_the_clock(place: list[int], over: threading.Event, pause_s: float) -> None:
    while not over.wait(pause_s):
        write(f"step {place[0]} loss {1 / (1 + place[0]):.6f}\n")


def main() -> None:
    how, steps, step_s, *odd = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
    state = Path(os.environ["CHAOSKIT_RUN_DIR"]) / "step"
    first = int(state.read_text()) if state.exists() else 0
    bar = Bar(steps, first) if how in ("bar", "bare") else None
    place, over = [first], threading.Event()
    peer = None
    if how == "again":
        peer = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "1"})
    if how in ("clock", "stalls"):
        pause_s = BAR_S if how == "clock" else 0.5
        threading.Thread(target=by_the_clock, args=(place, over, pause_s), daemon=True).start()
    for step in range(first, steps):
        time.sleep(PAUSES_S.get((how.partition("-")[0], first, step), step_s))
        if not how.startswith("loses") or step % 10 == 9:
            draft = state.with_suffix(".draft")
            draft.write_text(str(step + 1))
            draft.replace(state)
        place[0] = step
        loss = f"{1 / (1 + step):.6f}"
        if bar is not None:
            bar.update(loss if how == "bar" else "")
        elif how in ("steady", "loses-drawn"):
            write(f"\rstep {step} loss {loss}")
        elif how in ("epochs", "uneven"):
            write(f"epoch {step // 10} step {step % 10} loss {loss}\n")
        elif how == "colours":
            write(
                f"\x1b[32m10:00:00\x1b[0m step \x1b[1;36m{step}\x1b[0m loss \x1b[33m{loss}\x1b[0m\n"
            )
        elif how == "thousands":
            write(f"step {step + 985:,} loss {loss}\n")
        elif how == "abbreviated":
            write(f"step {f'{step + 985}' if step < 15 else '1.0k'} loss {loss}\n")
        elif how == "endless":
            write(f"step {step} ")
        elif how not in ("clock", "quiet"):
            write(f"step {step} loss {loss}\n")
        if how == "loses" and step % 12 == 11 and odd:
            write(f"{odd[0]}\n")
        if peer is not None and peer.poll() is not None:
            peer = None
            for _ in range(3):
                time.sleep(step_s)
                write(f"step {step} loss {loss}\n")
    over.set()
    if peer is not None:
        peer.kill()
        peer.wait()
    if bar is not None:
        bar.close()
    elif how in ("steady", "loses-drawn"):
        write("\n")


if __name__ == "__main__":
    main()
