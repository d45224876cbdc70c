"""The noise contract's constants, and the expansion of a seed root."""

import hashlib

import pytest
from solrl_proto.noise import NOISE_SEED_BITS, SEED_LIMIT, expand_seeds


def by_hand(root: int, prompt_id: str, index: int) -> int:
    """The specification, bit by bit: the first 53 of the digest's 256 bits."""
    bits = "".join(f"{byte:08b}" for byte in hashlib.sha256(b"%d/%s/%d" % (root, prompt_id.encode(), index)).digest())
    return int(bits[:53], 2)


@pytest.mark.parametrize(("root", "prompt_id"), [(0, "p0"), (42, "explore/3"), (SEED_LIMIT - 1, "a/b"), (7, "日本 ü")])
def test_seeds_are_expanded_as_specified(root: int, prompt_id: str) -> None:
    seeds = expand_seeds(root, prompt_id, 96)
    assert seeds == [by_hand(root, prompt_id, index) for index in range(96)]
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert len(set(seeds)) == 96
    assert expand_seeds(root, prompt_id, 5) == seeds[:5]


def test_the_expansion_never_changes() -> None:
    # sha256sum of "7/p0/0" begins 2420bebae8b981d0, which is 1271137839159088 · 2**11 and a rest.
    assert expand_seeds(7, "p0", 3) == [1271137839159088, 8057174869009028, 6763684728102615]


def test_seeds_that_would_draw_equal_noise_are_passed_over() -> None:
    """Numbers 729 and 749 of this root agree in the lower 32 bits."""
    assert by_hand(17896, "p0", 729) % 2**32 == by_hand(17896, "p0", 749) % 2**32
    seeds = expand_seeds(17896, "p0", 1000)
    assert seeds == [by_hand(17896, "p0", index) for index in range(1001) if index != 749]
    assert len({seed % 2**NOISE_SEED_BITS for seed in seeds}) == 1000
    assert expand_seeds(17896, "p0", 749) == seeds[:749]
