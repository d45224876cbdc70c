"""A trainer's rewards at a reward server: what is checked before a run, and a whole run that asks one."""

from pathlib import Path

import pytest
from reward_servers import serving
from solrl_core import diagnosis
from solrl_proto.rollouts import PromptItem
from solrl_reward.app import create_app
from solrl_reward.settings import Settings
from solrl_trainer.metrics import read_metrics
from solrl_trainer.preflight import require_judges, usable_judges
from solrl_trainer.presets import resolve
from solrl_trainer.run import run
from solrl_trainer.run_memory import reward_sizes

AWAY = "http://127.0.0.1:9"
SMALL = (
    *("lora.rank=2", "lora.alpha=4", "optimizer.updates=1", "optimizer.batch=8", "iterations=1"),
    *("explore.source=local", "explore.prompts=1", "explore.candidates=8", "explore.keep=4", "explore.steps=2"),
    *("regenerate.steps=2", "evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.rewards=[]"),
)


def test_a_reward_of_a_server_needs_no_code_here() -> None:
    prompts, options = [PromptItem(id="p", text="a red circle")], {"elsewhere:only": {"at": AWAY}}
    require_judges(["elsewhere:only"], prompts, "train", options)
    noted: list[str] = []
    assert usable_judges(["elsewhere:only", "verifier"], prompts, noted.append, options) == ["elsewhere:only"]
    assert len(noted) == 1
    with pytest.raises(ValueError, match="elsewhere"):
        require_judges(["elsewhere:only"], prompts, "train")


def test_it_takes_no_memory_and_doctor_says_where_it_is() -> None:
    changes = ["rewards={clipscore: 1}", f"reward_options={{clipscore: {{at: '{AWAY}'}}}}", "evaluate.rewards=[]"]
    config = resolve("mini-sana/sol_rl/clipscore", overrides=changes).config
    assert reward_sizes(config, {}) == {"clipscore": 0}
    found = {one.subject: one for one in diagnosis.rewards(["clipscore"], "mini-sana", options=config.reward_options)}
    assert found["reward clipscore"].state == "n/a"
    assert AWAY in found["reward clipscore"].found


@pytest.mark.slow
def test_a_run_with_a_reward_server_equals_a_local_one_up_to_the_rounding_to_bytes(tmp_path: Path) -> None:
    found = []
    with serving(create_app(Settings(rewards=("clipscore",), options_from="mini-sana", device="cpu"))) as address:
        for folder, options in (("here", "{}"), ("there", f"{{clipscore: {{at: '{address}'}}}}")):
            overrides = [*SMALL, f"reward_options={options}"]
            arguments = {"output": tmp_path / folder, "rollout_url": AWAY}
            run(resolve("mini-sana/sol_rl/clipscore", overrides=overrides, arguments=arguments).config)
            lines = read_metrics(tmp_path / folder / "metrics.jsonl")
            (iteration,) = [line for line in lines if line["event"] == "iteration"]
            found.append(iteration)
    here, there = found
    assert there["rewards"]["clipscore"] == pytest.approx(here["rewards"]["clipscore"], abs=5e-3)
    assert there["proxy_mean"] == pytest.approx(here["proxy_mean"], abs=5e-3)
    assert there["proxy_mean"] != here["proxy_mean"], "the server scored rounded images"
