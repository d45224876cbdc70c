"""Names of devices: each program refuses one that is none, or that this machine lacks, before it loads anything."""

import pytest
import torch
from solrl_core.devices import require_device
from solrl_reward.__main__ import main as reward_main
from solrl_rollout.__main__ import main as rollout_main
from solrl_trainer.__main__ import main as trainer_main
from tests.support.typed import refused

ABSENT = "got device cuda:99, and PyTorch finds "
NONE = "got device 'tpu'; expected auto, cpu, cuda, or cuda:1 with the number of a GPU"


def test_auto_and_the_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, cases in {
        0: {"auto": "cpu", "cpu": "cpu", "cuda": "finds no GPU; expected cpu or auto", "cuda:1": "finds no GPU"},
        2: {"auto": "cuda", "cuda": "cuda", "cuda:1": "cuda:1", "cuda:2": "finds 2 GPUs; expected a number below 2"},
    }.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        for name, found in cases.items():
            if "finds" not in found:
                assert require_device(name) == found
                continue
            with pytest.raises(ValueError, match=f"got device {name}, and PyTorch {found}"):
                require_device(name)


@pytest.mark.parametrize(("name", "said"), [("tpu", NONE), ("cuda:99", ABSENT)])
def test_every_program_refuses_such_a_device_before_loading(name: str, said: str) -> None:
    setting = f"device={name}"
    options = f'{{"clipscore": {{"device": "{name}"}}}}'
    for told in (
        refused(trainer_main, "run", "--dry-run", "--set", setting),
        refused(trainer_main, "run", "--dry-run", "--set", f"reward_options={options}"),
        refused(rollout_main, "serve", "--port", "0", "--device", name),
        refused(rollout_main, "serve", "--port", "0", "--device", "cpu", "--reward-options", options),
        refused(rollout_main, "check", "mini-sana", "--device", name),
        refused(reward_main, "serve", "--port", "0", "--device", name),
    ):
        assert said in told
        assert "loading" not in told
