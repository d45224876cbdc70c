"""Sampler: candidates of any prompts by a plan, in batches that fit into memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_core.sampling.solver_specs import SolverSpec
from solrl_proto.rollouts import Plan, PromptItem

from solrl_engine.backend import GenerationRequest
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.local_backend import generate


@dataclass(frozen=True)
class Sampler:
    """Draws samples from a generator under the adapter that is merged into it.

    Attributes:
        generator: generator with a policy merged.
        plan: returns the plan under the merged version; the generator sets the precision.
        solver: returns what replaces the plan's solver, for steps that no plan can name.
        record: record every step.
        batch: largest number of samples in a batch.
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
        request = GenerationRequest(
            prompts=[prompt.text for prompt in prompts],
            seeds=seeds,
            plan=self.plan(),
            precision=self.generator.precision,
            solver=self.solver(),
            record=self.record,
        )
        parts = self.batch.run(len(seeds), lambda rows: generate(self.generator, request.rows(rows), self.batch.size))
        return GeneratorOutput.join(parts)
