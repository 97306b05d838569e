"""Indices of the samples of each step: computed from seed and step, never replayed.

    tokens = np.memmap("corpus.tokens", np.uint16, mode="r")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 1025)[::1024]
    positions = Positions(len(windows), batch_size=512, seed=0)
    for step in range(first_step, last_step):  # any first step costs the same: nothing
        batch = windows[positions.batch(step, rank, world)]

This package works in any training loop, without a run of chaoskit.
"""

from chaoskit.data.permutation import Permutation
from chaoskit.data.positions import Positions

__all__ = ["Permutation", "Positions"]
