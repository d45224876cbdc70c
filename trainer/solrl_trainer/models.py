"""The models of a run: one base, the policies trained on it, and the generators that sample from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from solrl_core.adapter import Adapter, adapter_digest, decode_adapter
from solrl_core.families import Backbone
from solrl_core.generator import Generator
from solrl_core.precision import fastest_tier
from solrl_proto.identifiers import Tier

from solrl_trainer.config import RunConfig
from solrl_trainer.policy import Policy
from solrl_trainer.sharding import freed_bytes, is_sharded, shard_base
from solrl_trainer.training_memory import blocks_to_recompute
from solrl_trainer.world import SoloWorld, World


@dataclass
class Models:
    """A backbone with its generators and policies.

    Attributes:
        backbone: the model, whose transformer is trained.
        generator: BF16 generator for regenerated samples and evaluations.
        explorer: generator of local exploration; `generator` itself if that explores in BF16 or if a service explores.
        policy: current, behaviour and reference policies.
        world: ranks that train together, in step if they share the base's weights.
        behaviour_digest: digest of the file of the behaviour policy; empty before one is merged.
    """

    backbone: Backbone
    generator: Generator
    explorer: Generator
    policy: Policy
    world: World
    behaviour_digest: str = field(default="", init=False)
    _behaviour: Adapter | None = field(default=None, init=False)

    @classmethod
    def build(
        cls, backbone: Backbone, config: RunConfig, note: Callable[[str], None], world: World | None = None
    ) -> "Models":
        """Build generators and policies on a clean backbone, in the only order that works.

        A generator copies the clean transformer and keeps references to the weights under each adapter. The policy
        then replaces those layers in place, so every generator comes before the policy.

        Args:
            backbone: the loaded model; its transformer gets the policy's adapters.
            config: the run's settings.
            note: shows a line of text to the user.
            world: ranks that train together, over which the base may be spread; by default this process alone.
        """
        world = world or SoloWorld()
        generator = Generator(backbone, "bf16")
        precision = explored_precision(config, fastest_tier(backbone.device))
        explorer = generator if precision == generator.precision else Generator(backbone, precision)
        if not is_sharded(config, backbone, world):
            return cls(backbone, generator, explorer, build_policy(backbone, config, note), world)
        freed = freed_bytes(backbone, generator, world.size)
        note(f"the base is sharded across {world.size} ranks; optimizer.shard_base overrides this")
        policy = build_policy(backbone, config, note, freed)
        others = [] if explorer is generator else [explorer]
        return cls(backbone, generator, explorer, policy, shard_base(backbone, generator, others, policy, world))

    def merge_behaviour(self, adapter: bytes) -> None:
        """Merge a version of the behaviour policy; `adapter` is the file that a service gets, too."""
        self.behaviour_digest = adapter_digest(adapter)
        self._behaviour = decode_adapter(adapter, self.generator.layout)
        self.generator.set_adapter(self._behaviour)
        if self.explorer is not self.generator:
            self.explorer.set_adapter(self._behaviour)

    @contextmanager
    def serving(self, adapter: Adapter | None) -> Iterator[Generator]:
        """Merge `adapter` (None: the base) into the BF16 generator within the block, then the behaviour policy again.

        After an error in the block the generator keeps `adapter`.
        """
        self.generator.set_adapter(adapter)
        yield self.generator
        # Not after an error: merging into a sharded base is a collective, which the other ranks would not join.
        if self._behaviour is not None:
            self.generator.set_adapter(self._behaviour)


def explored_precision(config: RunConfig, fastest: Tier) -> Tier:
    """Precision of the local explorer's generator; BF16 if a service explores.

    `auto` is the device's `fastest` native precision, and BF16 if training uses the candidates themselves.
    """
    if config.uses_service:
        return "bf16"
    if config.explore.precision != "auto":
        return config.explore.precision
    return fastest if config.two_stage else "bf16"


def build_policy(backbone: Backbone, config: RunConfig, note: Callable[[str], None], freed: int = 0) -> Policy:
    """Inject the run's adapters into the backbone's transformer, and plan which activations to keep.

    Args:
        backbone: the loaded model.
        config: the run's settings.
        note: shows a line of text to a person.
        freed: bytes of the base that will leave the GPU.
    """
    reference = None
    if config.optimizer.reference == "fp8" and backbone.device.type == "cuda":
        reference = Generator(backbone, "fp8").transformer
    recomputed = blocks_to_recompute(config, backbone, note, freed)
    policy = Policy(backbone, config.lora, config.seed, reference=reference)
    policy.recompute(recomputed)
    return policy
