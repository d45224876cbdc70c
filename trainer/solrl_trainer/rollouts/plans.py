"""Plans of a run: of the candidates that it explores, and of the samples that it trains on."""

from solrl_proto.rollouts import Plan

from solrl_trainer.settings.config import RunConfig


def training_plan(config: RunConfig, steps: int) -> Plan:
    """The plan of the samples that are trained on, with this number of steps."""
    return Plan(steps=steps, solver=config.solver, guidance=config.guidance, precision="bf16")


def exploration_plan(config: RunConfig, iteration: int) -> Plan:
    """The exploration plan of an iteration."""
    explore = config.explore
    return Plan(
        steps=explore.steps,
        prune=explore.prune,
        solver=config.solver,
        fitted=explore.fitted,
        sde=config.explored_steps(iteration),
        guidance=config.guidance,
        precision=explore.precision,
        adapter=explore.adapter,
        decoder_precision=explore.decoder_precision,
        frames=explore.frames,
    )
