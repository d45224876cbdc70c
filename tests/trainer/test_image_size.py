"""The size of images as a setting of a run, of its service and of an evaluation: not that of the model, nor square."""

from pathlib import Path

import pytest
from solrl_core.errors import MismatchError
from solrl_core.families import load_backbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.model_options import ImageSize
from solrl_core.sampling.generator import Generator
from solrl_trainer.commands.evaluate import evaluate_run
from solrl_trainer.commands.run import run
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.loop import train
from solrl_trainer.settings.config import RunConfig
from tests.support.service_helpers import running_service
from tests.support.small_model import small_model
from tests.trainer.real_runs import SMALL, Watcher
from tests.trainer.training_helpers import tiny_config


def test_a_run_explores_trains_and_evaluates_at_its_size_and_another_evaluation_at_its_own(tmp_path: Path) -> None:
    size = ("generate.height=32", "generate.width=96")
    # The judge takes images of the model's own size alone.
    one = (f"model={small_model()}", "iterations=1", "evaluate.rewards=[]")

    def config(*given: str) -> RunConfig:
        return tiny_config(*SMALL, *one, *given, output=tmp_path, run="wide", rollout_url=service.url)

    with running_service("--height", "32", "--width", "96", model=small_model()) as service:
        (model,) = service.client.get("/v1/models").json()["models"]
        assert (model["height"], model["width"]) == (32, 96)
        with pytest.raises(MismatchError, match="images of another size") as refused:
            train(config("generate.width=96"), Watcher())
        assert (refused.value.fields["got"], refused.value.fields["expected"]) == ("96×32", "96×64")
        run(config(*size))
    made = load_gallery(tmp_path)
    for images in (made.after, made.explored, made.regenerated):
        assert images.shape[1:] == (3, 32, 96)
    for given, shape in (((), (32, 96)), (("generate.height=64", "generate.width=32"), (64, 32))):
        evaluate_run(tmp_path, overrides=given, prompts=1, seeds=1, rewards=["clipscore"])
        assert load_gallery(tmp_path / "evaluation").after.shape == (1, 3, *shape)


def test_one_side_alone_leaves_the_other_and_a_size_that_does_not_fit_is_refused() -> None:
    backbone = load_backbone("mini-flux", size=ImageSize(width=32))
    images = Generator(backbone, "bf16").generate("a red circle", [0], steps=1).images
    assert images.shape == (1, 3, 64, 32)
    assert backbone.options.rewards
    assert (load_skeleton("mini-flux", size=ImageSize(32)).height, backbone.latent_shape) == (32, (4, 16, 8))
    with pytest.raises(ValueError, match="got images of 64×36 px; mini-flux needs multiples of"):
        load_backbone("mini-flux", size=ImageSize(height=36))
