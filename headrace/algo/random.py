"""Draw random numbers without state: seeds derived by hashing, uniforms by counter.

The uniform number for (seed, position) is a pure function of both, so a sample does not depend on what else was
sampled, in which order, or before which restart.
"""

import hashlib

import numpy as np
import numpy.typing as npt

# Constants of SplitMix64; `infer/cuda/sampling_kernels.py` has them as literals of a kernel.
WEYL_INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from any sequence of integers and strings; 1 and "1" give different seeds."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        assert isinstance(part, int | str)
        text = str(part).replace("%", "%25").replace(";", "%3B")  # no part can spell another's end
        digest.update(f"{type(part).__name__}:{text};".encode())
    return int.from_bytes(digest.digest(), "big") >> 1


def uniforms(
    seeds: npt.NDArray[np.uint64] | list[int], positions: npt.NDArray[np.uint64] | list[int]
) -> npt.NDArray[np.float64]:
    """Draw u(seed, position) in (0, 1), float64: two rounds of the SplitMix64 finaliser over a Weyl sequence."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = splitmix64(seed + np.uint64(WEYL_INCREMENT))
        mixed = splitmix64(mixed ^ splitmix64(position * np.uint64(0xD1342543DE82EF95) + np.uint64(0x632BE59BD9B4E019)))
    drawn = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.minimum(drawn, 1.0 - 2.0**-53)  # the half of the largest integer rounds up, to 1.0


def splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit numbers, one to one: the finaliser of SplitMix64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return value ^ (value >> np.uint64(31))
