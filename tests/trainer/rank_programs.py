"""Programs for tests with several ranks; each runs in a separate process."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def solrl_train(argv: Sequence[str]) -> None:
    """`solrl-train`, whose reports have no charts, as in conftest.py."""
    from solrl_trainer.__main__ import main
    from solrl_trainer.report import charts

    charts._svg = lambda *_: "<svg></svg>"
    sys.argv = ["solrl-train", *argv]
    main()


def with_a_late_rank(argv: Sequence[str]) -> None:
    """`solrl-train`; rank 1 is still parsing its arguments when rank 0 ends."""
    from solrl_trainer.commands import cli

    if os.environ["RANK"] == "1":
        cli.parse_on_all_ranks = lambda *_: time.sleep(600)  # type: ignore[assignment]
    solrl_train(argv)


def with_weights_apart(argv: Sequence[str]) -> None:
    """`solrl-train`, with a fault in the arithmetic of rank 1."""
    from solrl_trainer.policy.policy import Policy

    average = Policy.decay_and_average

    def faulty(policy: Policy, *rest: Any) -> None:
        if os.environ["RANK"] == "1":
            policy.parameters[0].data += 1
        average(policy, *rest)

    Policy.decay_and_average = faulty  # type: ignore[method-assign]
    solrl_train(argv)


def with_a_slow_rank(argv: Sequence[str]) -> None:
    """`solrl-train` with no time for collectives beyond the patience; rank 1 is two seconds late in each iteration."""
    from solrl_trainer.ranks import collectives
    from solrl_trainer.rollouts.exploration import IterationSamples

    collectives._MARGIN = 0.001
    gather = IterationSamples.gather.__func__  # type: ignore[attr-defined]

    def slow(cls: type[IterationSamples], *arguments: Any) -> IterationSamples:
        if os.environ["RANK"] == "1":
            time.sleep(2)
        found: IterationSamples = gather(cls, *arguments)
        return found

    IterationSamples.gather = classmethod(slow)  # type: ignore[assignment,method-assign]
    solrl_train(argv)


def held_bytes(setting: str, output: str) -> None:
    """Bytes of all tensors that a rank holds after a training step and an image."""
    import gc
    from pathlib import Path

    import torch
    from solrl_core.families import load_backbone
    from solrl_trainer.ranks.rank_info import read_rank_info
    from solrl_trainer.ranks.rank_runtime import process_group
    from solrl_trainer.rollouts.models import Models
    from solrl_trainer.settings.presets import resolve
    from torch.distributed.tensor import DTensor

    config = resolve("mini-sana/diffusionnft/clipscore", overrides=["lora.rank=2", setting]).config
    with process_group(read_rank_info()) as processes:
        models = Models.build(load_backbone("mini-sana"), config, processes.world("cpu", 0))
        backbone = models.backbone
        latents = torch.zeros(1, *backbone.latent_shape)
        transformer = models.policy.transformer
        velocity = backbone.velocity(transformer, latents, torch.ones(1), backbone.encode(["a circle"]))
        torch.autograd.grad(velocity.sum(), models.policy.parameters)
        models.generator.generate("a circle", [1], steps=1)
        models.world.gather(torch.zeros(1))
        gc.collect()
        every = [one.detach() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        here = [one.to_local() if isinstance(one, DTensor) else one for one in every]
        whole = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in here}
        Path(f"{output}-{os.environ['RANK']}").write_text(str(sum(whole.values())))


def with_another_device(argv: Sequence[str]) -> None:
    """`solrl-train`, where rank 1 finds a GPU."""
    from solrl_trainer.ranks import communicator

    if os.environ["RANK"] == "1":
        communicator.pick_device = lambda name, process: "cuda:1"
    solrl_train(argv)


def with_a_death_in_a_collective(argv: Sequence[str]) -> None:
    """`solrl-train`, where rank 1 dies when the other has entered a collective."""
    import signal

    import torch.distributed as dist

    gather, calls = dist.all_gather, []

    def deadly(*arguments: Any) -> Any:
        calls.append(arguments)
        if os.environ["RANK"] == "1" and len(calls) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*arguments)

    dist.all_gather = deadly
    solrl_train(argv)


def with_a_broken_reward(argv: Sequence[str], rank: int) -> None:
    """`solrl-train`, where a reward of one rank fails."""
    from solrl_core.rewards import RewardSet

    def broken(*arguments: Any) -> Any:
        raise ValueError("the reward is broken")

    if os.environ["RANK"] == str(rank):
        RewardSet.score = broken  # type: ignore[method-assign]
    solrl_train(argv)


def with_few_fitted_prompts(argv: Sequence[str]) -> None:
    """`solrl-train calibrate`, with solvers fitted to few prompts."""
    from solrl_trainer.calibration import plans as plans_module

    plans_module.FITTED_PROMPTS = 2
    solrl_train(argv)


def with_a_forgetful_service(argv: Sequence[str], run: str, explored: str) -> None:
    """`solrl-train`; when rank 0 has all candidates of iteration 1, the service loses the run before rank 1 asks."""
    from pathlib import Path

    from solrl_trainer.rollouts.exploration import IterationSamples
    from solrl_trainer.service.run_requests import RunRequests

    request, gather, complete = RunRequests.candidates_of, IterationSamples.gather.__func__, Path(explored)  # type: ignore[attr-defined]

    def late(client: RunRequests, prompts: Any, version: int, *rest: Any, **more: Any) -> Any:
        if version == 1:
            while not complete.exists():
                time.sleep(0.02)
            client.client.delete(run)
        return request(client, prompts, version, *rest, **more)

    def noted(cls: type[IterationSamples], *arguments: Any) -> IterationSamples:
        if arguments[2].version == 1:
            complete.touch()
        found: IterationSamples = gather(cls, *arguments)
        return found

    if os.environ["RANK"] == "1":
        RunRequests.candidates_of = late  # type: ignore[method-assign]
    else:
        IterationSamples.gather = classmethod(noted)  # type: ignore[assignment,method-assign]
    solrl_train(argv)
