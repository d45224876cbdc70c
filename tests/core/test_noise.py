"""The noise contract: a seed determines its row of noise, independent of process, batch and order."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
from solrl_core.errors import MismatchError
from solrl_core.sampling.noise import check_noise_contract, initial_noise, noise_contract, step_noise
from solrl_proto.models import NoiseContract
from solrl_proto.noise import NOISE_CONTRACT_VERSION, NOISE_SEED_BITS, PROBE_LENGTH, SEED_LIMIT, expand_seeds

SEEDS = [0, 1, 2**32, 20_260_406, SEED_LIMIT - 1]

SHAPE = (8, 8, 8)


def digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()


def test_rows_are_standard_normal_and_depend_on_their_seeds_alone() -> None:
    rows = initial_noise(range(200), SHAPE)
    assert rows.shape == (200, *SHAPE)
    assert rows.dtype == torch.float32
    assert rows.device.type == "cpu"
    assert abs(float(rows.mean())) < 0.02
    assert abs(float(rows.std()) - 1) < 0.02
    assert len({digest(row) for row in rows}) == 200
    for shape in (SHAPE, (16, 128, 128)):  # the larger rows are drawn by threads
        expected = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS]
        assert torch.equal(initial_noise(SEEDS, shape), torch.stack(expected))
    # Rows drawn by threads belong to the caller's inference mode.
    with torch.inference_mode():
        assert initial_noise(SEEDS, (16, 128, 128)).is_inference()
    assert not initial_noise(SEEDS, (16, 128, 128)).is_inference()
    # The global generator is neither read nor moved.
    torch.manual_seed(1)
    before = initial_noise(SEEDS, SHAPE)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(before, initial_noise(SEEDS, SHAPE))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("company", [[], [5], SEEDS, list(range(100, 130))])
def test_rows_do_not_depend_on_batch_or_order(company: list[int]) -> None:
    alone = torch.cat([initial_noise([seed], SHAPE) for seed in SEEDS])
    after = initial_noise([*company, *SEEDS], SHAPE)[len(company) :]
    backwards = initial_noise([*SEEDS[::-1], *company], SHAPE)[: len(SEEDS)].flip(0)
    assert torch.equal(alone, after)
    assert torch.equal(alone, backwards)


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """A process whose default dtype is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_rows_do_not_depend_on_the_default_dtype_or_device(other_defaults: None) -> None:
    rows = initial_noise(SEEDS, SHAPE)
    none = initial_noise([], SHAPE)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(rows, initial_noise(SEEDS, SHAPE))
    assert none.dtype == torch.float32
    assert none.shape == (0, *SHAPE)
    with torch.device("meta"):
        rows = initial_noise(SEEDS, SHAPE)
        assert initial_noise([], SHAPE).device.type == "cpu"
    assert torch.equal(rows, initial_noise(SEEDS, SHAPE))


@pytest.mark.parametrize("seed", [-1, SEED_LIMIT, 2**64])
def test_a_seed_out_of_range_is_refused_by_name(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed {seed}.*2\*\*53"):
        initial_noise([0, seed], SHAPE)


def test_the_noise_of_a_step_depends_on_seed_and_step_alone() -> None:
    rows = step_noise([3, 4], 0, (2, 5))
    assert torch.equal(step_noise([4], 0, (2, 5))[0], rows[1])
    assert torch.equal(rows[0], initial_noise(expand_seeds(3, "step/0", 1), (2, 5))[0])
    distinct = torch.cat([initial_noise([3, 4], (2, 5)), rows, step_noise([3, 4], 1, (2, 5))]).flatten(1)
    assert float(torch.cdist(distinct, distinct).fill_diagonal_(9).min()) > 1


def changed(version: int = NOISE_CONTRACT_VERSION, length: int = PROBE_LENGTH, **at: float) -> NoiseContract:
    """Our contract with another version, a probe of another length, or something added to some of its values."""
    probe = [value + at.get(f"i{index}", 0.0) for index, value in enumerate((*noise_contract().probe, 0.0))]
    return NoiseContract(version=version, probe=tuple(probe[:length]))


def test_an_equal_contract_passes_also_within_the_tolerance() -> None:
    check_noise_contract(noise_contract())
    check_noise_contract(changed(i0=5e-6, i15=-5e-6))


@pytest.mark.parametrize(
    ("theirs", "where"),
    [
        (changed(version=2), "noise.version"),
        *[(changed(**{at: off}), "noise.probe") for at, off in (("i0", 2e-5), ("i15", -2e-5))],
        *[(changed(**{at: off}), "noise.probe") for at, off in (("i7", float("nan")), ("i0", float("inf")))],
        *[(changed(length=length), "noise.probe") for length in (0, 1, PROBE_LENGTH - 1, PROBE_LENGTH + 1)],
    ],
)
def test_another_contract_is_refused(theirs: NoiseContract, where: str) -> None:
    with pytest.raises(MismatchError) as raised:
        check_noise_contract(theirs)
    assert (raised.value.fault, raised.value.where) == ("noise", where)
    assert str(raised.value).startswith("Noise contracts differ: the service")
    assert raised.value.action


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


def test_the_expansion_never_changes_and_passes_over_seeds_of_equal_noise() -> None:
    # sha256sum of "7/p0/0" begins 2420bebae8b981d0, which is 1271137839159088 · 2**11 and a rest.
    assert expand_seeds(7, "p0", 3) == [1271137839159088, 8057174869009028, 6763684728102615]
    # Numbers 729 and 749 of this root agree in the lower 32 bits.
    assert by_hand(17896, "p0", 729) % 2**32 == by_hand(17896, "p0", 749) % 2**32
    seeds = expand_seeds(17896, "p0", 1000)
    assert seeds == [by_hand(17896, "p0", index) for index in range(1001) if index != 749]
    assert len({seed % 2**NOISE_SEED_BITS for seed in seeds}) == 1000
    assert expand_seeds(17896, "p0", 749) == seeds[:749]
