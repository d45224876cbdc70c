"""Sampler: candidates of any prompts by a plan, in batches that fit into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_core.sampling.sampler import SolverSpec
from solrl_proto.rollouts import Plan, PromptItem

from solrl_engine.batch_size import AdaptiveBatchSize


@dataclass(frozen=True)
class Sampler:
    """Draws samples from a generator under the adapter that is merged into it.

    Attributes:
        plan: returns the plan under the merged version; the generator sets the precision.
        solver: returns what replaces the plan's solver, for steps that no plan can name.
    """

    generator: Generator
    plan: Callable[[], Plan]
    solver: Callable[[], SolverSpec | None] = lambda: None
    record: bool = False
    batch: AdaptiveBatchSize = field(default_factory=AdaptiveBatchSize)

    def sample(self, prompts: Sequence[PromptItem], seeds: Sequence[int]) -> GeneratorOutput:
        """Generate the samples of these seeds, with a prompt for each.

        Raises:
            torch.OutOfMemoryError: not even one sample fits.
        """
        texts, plan = [prompt.text for prompt in prompts], self.plan()
        solver = self.solver() or plan.solver_spec

        def generate(rows: slice) -> GeneratorOutput:
            return self.generator.generate(
                texts[rows],
                seeds[rows],
                steps=plan.steps,
                solver=solver,
                guidance=plan.guidance,
                batch_limit=self.batch.size,
                record=self.record,
            )

        return GeneratorOutput.join(self.batch.run(len(seeds), generate))
