"""A shuffled order of any length, each place of which can be computed alone.

A Feistel network permutes all numbers of a given bit length. A result outside of the range is
permuted again until it is inside ("cycle walking", less than twice on average). The order of 10⁹
samples therefore needs no memory and no set-up time.

-> data/positions.py: which places belong to a step and a rank.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from chaoskit.typed import typed_arguments

_ROUNDS = 8  # the number of keys in one BLAKE2b digest
_BITS_MIN = 6  # with fewer some orders would be more frequent than others

Words = NDArray[np.uint64]


class Permutation:
    """A permutation of ``range(size)``, the same for equal keys in every process, on every machine.

    Args:
        size: at most 2**62.
        key: integers, such as seed and epoch.
    """

    @typed_arguments
    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        bits = max(_BITS_MIN, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low, self._high = (
            np.uint64((1 << bits // 2) - 1),
            np.uint64((1 << bits - bits // 2) - 1),
        )
        digest = hashlib.blake2b(
            ",".join(map(str, (size, *key))).encode(), digest_size=8 * _ROUNDS
        ).digest()
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the permuted numbers at these places, each below ``size``, in the same shape.

        Args:
            places: from 0 to ``size - 1``, which is not checked.
        """
        values = self._permute(places.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= self.size)).size:
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64).reshape(places.shape)

    def _permute(self, values: Words) -> Words:
        """Return the permuted numbers, each below the power of two that covers the size."""
        high, low = values >> self._low_bits, values & self._low
        for number in range(0, _ROUNDS, 2):
            high ^= _mixed(low, self._keys[number]) & self._high
            low ^= _mixed(high, self._keys[number + 1]) & self._low
        return high << self._low_bits | low


def _mixed(values: Words, key: np.uint64) -> Words:
    """Return words of which each bit depends on all bits of value and key.

    This is the finalizer of SplitMix64.
    """
    mixed = values + key  # modulo 2**64, as all operations below
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
