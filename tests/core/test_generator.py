"""Generation from seeds under adapters; candidates do not depend on their batch."""

import copy
from typing import Any

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.families.pipeline import listed_blocks
from solrl_core.families.skeleton import load_skeleton
from solrl_core.lora import target_modules
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_core.sampling.sampler import Trajectory
from tests.core.lora_helpers import random_adapter, with_value

PROMPTS = ["a red circle", "two blue squares", "a green cross to the left of a yellow triangle"]
SEEDS = [3, 14, 159]
STEPS = 4


@pytest.fixture(scope="module")
def bf16(backbone: Backbone) -> Generator:
    return Generator(backbone, "bf16")


@pytest.fixture(scope="module")
def nvfp4(backbone: Backbone) -> Generator:
    return Generator(backbone, "nvfp4")


@pytest.fixture(params=["bf16", "nvfp4"])
def generator(request: pytest.FixtureRequest) -> Any:
    """A generator of either precision, serving the base."""
    found: Generator = request.getfixturevalue(request.param)
    found.set_adapter(None)
    return found


def weights(generator: Generator) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in generator.transformer.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_base_comes_back_bit_for_bit_after_many_adapters(backbone: Backbone, generator: Generator) -> None:
    before, clean = weights(generator), copy.deepcopy(backbone.transformer.state_dict())
    images = generator.generate(PROMPTS[0], SEEDS, steps=1).images
    adapters = [random_adapter(backbone, seed, size=0.05 * (seed + 1)) for seed in range(6)]
    generator.set_adapter(adapters[0])
    first = weights(generator)
    for adapter in (*adapters, adapters[0]):
        generator.set_adapter(adapter)
        assert not same(weights(generator), before)
    assert same(weights(generator), first)
    generator.set_adapter(None)
    assert same(weights(generator), before)
    assert torch.equal(generator.generate(PROMPTS[0], SEEDS, steps=1).images, images)
    assert same(dict(backbone.transformer.state_dict()), clean)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.4e38])
def test_a_bad_adapter_leaves_the_previous_one_serving(backbone: Backbone, generator: Generator, value: float) -> None:
    generator.set_adapter(random_adapter(backbone, 0))
    before, images = weights(generator), generator.generate(PROMPTS[0], SEEDS, steps=1).images
    last = list(target_modules(backbone.transformer, backbone.lora_targets))[-1]
    with pytest.raises(ValueError, match=last):
        generator.set_adapter(with_value(random_adapter(backbone, 1), last, value))
    assert same(weights(generator), before)
    assert torch.equal(generator.generate(PROMPTS[0], SEEDS, steps=1).images, images)


def test_two_generators_of_one_backbone_do_not_see_each_others_adapter(backbone: Backbone, bf16: Generator) -> None:
    bf16.set_adapter(None)
    before = weights(bf16)
    Generator(backbone, "bf16").set_adapter(random_adapter(backbone, 0))
    assert same(weights(bf16), before)
    # Only weights that an adapter changes are stored twice.
    clean = dict(backbone.transformer.named_parameters())
    own = {name for name, weight in bf16.transformer.named_parameters() if weight is not clean[name]}
    assert own == {f"{module}.weight" for module in bf16.layout}


def test_a_candidate_does_not_depend_on_its_batch_mates(backbone: Backbone, generator: Generator) -> None:
    generator.set_adapter(random_adapter(backbone, 0, size=0.02))
    alike = generator.generate(PROMPTS[0], range(CHUNK_SIZE), steps=STEPS)
    loud = generator.generate(
        [PROMPTS[0], *["four purple crosses"] * (CHUNK_SIZE - 1)], [0, *range(50, 73)], steps=STEPS
    )
    assert torch.equal(alike.images[0], loud.images[0])
    assert torch.equal(alike.latents[0], loud.latents[0])
    assert float((alike.images[1:] - loud.images[1:]).abs().max()) > 0.1


def check_close(generator: Generator, one: GeneratorOutput, other: GeneratorOutput) -> None:
    """The same candidates from batches of other sizes.

    The matrix products of other sizes sum in another order. In BF16 that is all; in NVFP4 a value that lies on a
    boundary may then take the next code, which moves a candidate a little, but never to another picture.
    """
    if generator.precision == "bf16":
        assert float((one.images - other.images).abs().max()) <= 1e-4
        assert float((one.latents - other.latents).abs().max()) <= 1e-4
    off = (one.latents - other.latents).flatten(1).norm(dim=1)
    apart = torch.cdist(one.latents.flatten(1), one.latents.flatten(1))
    assert float(off.max()) < 0.2 * float(apart[apart > 0].min())


def test_a_candidate_hardly_depends_on_the_size_of_its_batch(generator: Generator) -> None:
    whole = generator.generate(PROMPTS[0], range(CHUNK_SIZE + 2), steps=STEPS)
    assert len(whole.images) == len(whole.latents) == CHUNK_SIZE + 2
    for start, stop in ((0, 7), (5, 7), (CHUNK_SIZE - 1, CHUNK_SIZE + 2)):
        part = generator.generate(PROMPTS[0], range(start, stop), steps=STEPS)
        check_close(
            generator, part, GeneratorOutput(whole.trajectory.rows(slice(start, stop)), whole.images[start:stop])
        )


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other processors' matrix products round otherwise"
)
def test_latents_do_not_depend_on_the_rest_of_the_batch(generator: Generator) -> None:
    seeds = [3, 14, 15, 92, 65, 35, 89, *range(100, 100 + CHUNK_SIZE - 7)]
    together = generator.generate(PROMPTS[0], seeds, steps=STEPS).latents
    for part in ([0], [4], [6, 1], [5, 0, 2], [1, 2, 3, 4, 5]):
        alone = generator.generate(PROMPTS[0], [seeds[i] for i in part], steps=STEPS).latents
        assert torch.equal(alone, together[part])


def test_a_list_of_prompts_equals_single_prompts(generator: Generator) -> None:
    together = generator.generate(PROMPTS, SEEDS, steps=STEPS)
    singly = [generator.generate(prompt, [seed], steps=STEPS) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    made = GeneratorOutput(
        Trajectory.join([one.trajectory for one in singly]), torch.cat([one.images for one in singly])
    )
    check_close(generator, together, made)
    swapped = generator.generate(PROMPTS[::-1], SEEDS, steps=STEPS)
    assert torch.equal(together.images[1], swapped.images[1])
    assert float((together.images[0] - swapped.images[0]).abs().max()) > 0.01


@pytest.mark.parametrize(("at_once", "decoded"), [(96, [24]), (24, [6, 6]), (6, [6, 1]), (3, [3, 3, 1]), (1, [1] * 7)])
def test_a_gpus_decoder_sees_two_shapes(monkeypatch: pytest.MonkeyPatch, at_once: int, decoded: list[int]) -> None:
    """The limit and a quarter of it; a smaller batch of latents is padded."""
    backbone = load_skeleton("mini-sana")
    met = []

    def decode(latents: torch.Tensor) -> torch.Tensor:
        met.append(len(latents))
        return latents[:, :3]

    monkeypatch.setattr(backbone, "decode", decode)
    latents = torch.empty(7, *backbone.latent_shape, device="meta")
    assert len(Generator(backbone, "bf16").decode(latents, at_once)) == 7
    assert met == decoded


@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3", "mini-flux"])
def test_most_of_a_decoder_is_in_the_blocks_that_are_compiled(model: str) -> None:
    decoder = load_skeleton(model).parts["vae"].decoder
    blocks = list(listed_blocks(decoder))
    held = [parameter for block in blocks for parameter in block.parameters()]
    assert len({id(parameter) for parameter in held}) == len(held)  # none is in two
    assert sum(p.numel() for p in held) > 0.8 * sum(p.numel() for p in decoder.parameters())


def test_between_comes_before_each_step_and_images_are_the_decoded_latents(
    backbone: Backbone, bf16: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: GeneratorOutput = bf16.generate(PROMPTS[0], SEEDS, steps=2)
    assert made.latents.shape == (3, *backbone.latent_shape)
    assert torch.allclose(made.images, backbone.decode(made.latents), atol=1e-6)
    calls: list[None] = []
    bf16.generate("a", list(range(CHUNK_SIZE + 1)), steps=3, between=lambda: calls.append(None))
    # At least two chunks, each of three steps; a machine with more threads makes more of them.
    assert len(calls) >= 6
    assert len(calls) % 3 == 0
    events: list[str] = []

    def stop() -> None:
        events.append("between")
        if len(events) == 3:
            raise InterruptedError

    monkeypatch.setattr(backbone, "velocity", lambda *given: events.append("step") or given[1])
    with pytest.raises(InterruptedError):
        bf16.generate("a", [1], steps=2, between=stop)
    assert events == ["between", "step", "between"]


def test_nvfp4_images_differ_from_bf16_but_remain_close(bf16: Generator, nvfp4: Generator) -> None:
    bf16.set_adapter(None)
    nvfp4.set_adapter(None)
    exact = bf16.generate(PROMPTS[0], range(8), steps=STEPS).latents.flatten(1)
    rough = nvfp4.generate(PROMPTS[0], range(8), steps=STEPS).latents.flatten(1)
    off = (rough - exact).norm(dim=1)
    assert float(off.min()) > 1e-3
    assert float(off.mean()) < float((exact - exact.roll(1, 0)).norm(dim=1).mean())
