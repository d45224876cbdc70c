"""Constants of the noise contract, and the expansion of a seed root into a group's seeds.

Noise itself needs torch and is in `solrl_core.sampling.noise`; this is the part that a client in any language needs.
"""

import hashlib
from itertools import count as count_from

NOISE_CONTRACT_VERSION = 1
SEED_LIMIT = 2**53
NOISE_SEED_BITS = 32
"""torch's CPU generator reads this many low bits of a seed."""

PROBE_SEED = 20_260_406
PROBE_LENGTH = 16
PROBE_TOLERANCE = 1e-5


def expand_seeds(root: int, prompt_id: str, count: int) -> list[int]:
    """Return the `count` seeds of prompt `prompt_id` under `root`, which all draw different noise.

    Number i = 0, 1, 2, … is the top 53 bits, big-endian, of SHA-256 over the UTF-8 text `"{root}/{prompt_id}/{i}"`. The
    seeds are the first `count` of these numbers that differ from all before them in the bits that noise reads.

    Args:
        root: seed root of the request, 0 ≤ root < 2**53.
        prompt_id: the prompt's id in the request.
        count: how many seeds, at least 1.
    """
    seeds: dict[int, int] = {}
    for i in count_from():
        if len(seeds) == count:
            break
        seed = int.from_bytes(hashlib.sha256(f"{root}/{prompt_id}/{i}".encode()).digest()[:8], "big") >> 11
        seeds.setdefault(seed % 2**NOISE_SEED_BITS, seed)
    return list(seeds.values())
