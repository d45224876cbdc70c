"""Checkpoints: restored bit for bit, and written completely or not at all."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from solrl_core.families import Backbone
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.run_folder.checkpoints import DamagedCheckpointError
from solrl_trainer.settings.config import RunConfig
from tests.core.lora_helpers import own_copy
from tests.trainer.training_helpers import make_policy, make_samples, same, tiny_config, train_on


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny_config("keep_checkpoints=3", output=tmp_path)


Trained = tuple[Policy, torch.optim.AdamW]


@pytest.fixture(scope="module")
def trained(loaded: Backbone) -> Trained:
    """A policy whose three sets of weights differ, and an optimiser with moments."""
    config = tiny_config()
    mine = own_copy(loaded)
    policy, optimizer = make_policy(mine, config)
    train_on(make_samples(mine), policy, mine, optimizer, config, 0)
    policy.decay_old(0.5)
    policy.average(0, 0.9)
    return policy, optimizer


def write(trained: Trained, config: RunConfig, version: int) -> None:
    assert checkpoints.save(config.output, version, {version: b"adapter"}, *trained, config).is_dir()


def test_the_best_evaluated_checkpoint_is_kept(trained: Trained, config: RunConfig) -> None:
    def kept(version: int, held_out: dict[int, float]) -> list[int]:
        checkpoints.save(config.output, version, {version: b""}, *trained, config, held_out)
        return sorted(int(path.name) for path in config.output.iterdir())

    for version in (1, 2, 3):
        kept(version, {})
    scores = {0: 9.0, 1: 0.1, 2: 0.9, 3: 0.5}
    assert kept(4, scores) == [2, 3, 4]
    assert kept(5, scores) == [2, 3, 4, 5]
    assert kept(6, scores) == [2, 4, 5, 6]
    assert kept(7, scores | {5: 1.0}) == [5, 6, 7]
    assert kept(8, {}) == [6, 7, 8]
    assert checkpoints.best_kept(config.output, scores) is None


def everything(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"{name} {key}": value for name in (CURRENT, OLD) for key, value in policy.tensors(name).items()}
    tensors |= {f"averaged {key}": value.clone() for key, value in policy.averaged.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {index} {key}": value.clone() for key, value in state.items()}
    return tensors


def test_everything_is_restored_bit_for_bit(loaded: Backbone, trained: Trained, config: RunConfig) -> None:
    adapters = {5: b"five", 6: b"six", 7: b"seven"}
    checkpoints.save(config.output, 7, adapters, *trained, config)
    kept = everything(*trained)
    mine = own_copy(loaded)
    policy, optimizer = make_policy(mine, config)
    assert not same(everything(policy, optimizer), kept)
    found = checkpoints.latest(config.output)
    assert (found.version, found.adapters, found.config) == (7, adapters, config)
    checkpoints.restore(found, policy, optimizer)
    assert same(everything(policy, optimizer), kept)
    # Training continues identically.
    samples = make_samples(mine)
    old_policy, old_optimizer = trained
    original = copy.copy(mine)
    original.transformer = old_policy.transformer
    logged = train_on(samples, policy, mine, optimizer, config, 1)
    assert logged == train_on(samples, old_policy, original, old_optimizer, config, 1)
    assert same(everything(policy, optimizer), everything(old_policy, old_optimizer))
    # A restored optimiser keeps its learning rate.
    other = torch.optim.AdamW(policy.parameters, lr=0.5)
    checkpoints.restore(found, policy, other)
    assert other.param_groups[0]["lr"] == 0.5


def test_an_unfinished_checkpoint_is_ignored_and_later_ones_deleted(trained: Trained, config: RunConfig) -> None:
    write(trained, config, 1)
    partial = config.output / "000002.partial"
    shutil.copytree(config.output / "000001", partial)
    (partial / "state.safetensors").write_bytes(b"cut")
    found = checkpoints.latest(config.output)
    assert found.version == 1
    # The same version, written completely, replaces the unfinished one.
    write(trained, config, 2)
    assert not partial.exists()
    found = checkpoints.latest(config.output)
    assert found.version == 2
    # When a run is rewound, later ones are deleted.
    write(trained, config, 3)
    checkpoints.drop_after(config.output, 1)
    assert [path.name for path in config.output.iterdir()] == ["000001"]


def flip_a_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


NAMES = ["state.safetensors", "adapter.safetensors", "config.json", "parts.json", "checksums.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_damage_is_found_and_an_older_checkpoint_named(
    trained: Trained, config: RunConfig, name: str, damage: Callable[[Path], None]
) -> None:
    for version in (1, 2):
        write(trained, config, version)
    damage(config.output / "000002" / name)
    with pytest.raises(DamagedCheckpointError, match=r"000002 is damaged: .*000001 is intact: .* --checkpoint 1$"):
        checkpoints.latest(config.output)
    assert checkpoints.latest(config.output, 1).version == 1
    damage(config.output / "000001" / name)
    with pytest.raises(DamagedCheckpointError, match=r"000001 .*No other checkpoint is intact"):
        checkpoints.latest(config.output, 1)


def test_only_the_files_of_a_checkpoint_are_read_each_with_its_checksum(trained: Trained, config: RunConfig) -> None:
    for version in (1, 2):
        write(trained, config, version)
    folder = config.output / "000002"
    (folder / "adapter-000001.safetensors~").write_bytes(b"an editor's")
    (folder / "zeros").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    assert checkpoints.latest(config.output).version == 2
    sums = (folder / "checksums.json").read_text()
    for wrong in ("{}", "[]", json.dumps(json.loads(sums) | {"../../x": ""}), sums.replace("parts.json", "x.json")):
        (folder / "checksums.json").write_text(wrong)
        with pytest.raises(DamagedCheckpointError, match=r"000002 is damaged: checksums\.json .*000001 is intact"):
            checkpoints.latest(config.output)
    (folder / "checksums.json").write_text(sums)
    (folder / "parts.json").rename(config.output.parent / "parts.json")
    (folder / "parts.json").symlink_to(config.output.parent / "parts.json")
    with pytest.raises(DamagedCheckpointError, match=r"parts\.json is missing, or no regular file"):
        checkpoints.latest(config.output)
