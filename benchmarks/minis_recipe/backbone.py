"""Training of a miniature backbone of any family: flow matching, then preparation for NVFP4."""

from typing import Any

import torch
from solrl_core.families import Conditioning
from solrl_core.families.backbone import stack

from minis_recipe import rounding
from minis_recipe.autoencoder import mixed, to_latents
from minis_recipe.family import Family, text_encoders, wrap
from minis_recipe.loop import Budget, Rates, fit
from minis_recipe.quantization import quantizable

NO_CAPTIONS = 0.05
RATES = Rates(1.2e-3, average=0.9995)
AWARE_RATES = Rates(3e-4, average=0.998)


class _Pool:
    """Training set of latents and captions, drawn once; in a share of the captions one attribute is wrong.

    With `frozen` text encoders the captions are also encoded only once.
    """

    def __init__(
        self,
        family: Family,
        pipeline: Any,
        count: int,
        wrong_captions: float,
        device: str,
        seed: int,
        frozen: bool,
    ) -> None:
        self._family, self._pipeline, self._frozen = family, pipeline, frozen
        source = family.source(seed)
        latents, texts = [], []
        for start in range(0, count, 2048):
            combinations = source.draw(min(2048, count - start))
            with torch.no_grad(), mixed(pipeline.vae, device):
                latents.append(to_latents(pipeline.vae, source.images(combinations, device)))
            for combination in combinations:
                dice = source.rng.random()
                if dice < NO_CAPTIONS:
                    texts.append("")
                else:
                    wrong = dice < NO_CAPTIONS + wrong_captions
                    texts.append(source.caption(source.change(combination) if wrong else combination))
        self._latents = torch.cat(latents)
        texts_by_part = [texts[start : start + 2048] for start in range(0, count, 2048)]
        parts = [
            {name: ids.to(device) for name, ids in family.tokenize(pipeline, part).items()} for part in texts_by_part
        ]
        if frozen:
            with torch.no_grad():
                parts = [family.encode(pipeline, tokens) for tokens in parts]
        self._captions = stack(parts)

    def draw(self, count: int) -> tuple[torch.Tensor, Conditioning]:
        """Draw a batch of clean latents and their encoded captions."""
        pick = torch.randint(len(self._latents), (count,), device=self._latents.device)
        captions = {name: rows[pick] for name, rows in self._captions.items()}
        return self._latents[pick], captions if self._frozen else self._family.encode(self._pipeline, captions)


def _float32_norms(transformer: torch.nn.Module) -> None:
    """Cast inputs of RMSNorm to float32. Under autocast, bfloat16 inputs with float32 weights give NaN gradients."""
    for module in transformer.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


def _noisy(clean: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Latents at times t [N]."""
    return torch.lerp(clean, noise, t.view(-1, *[1] * (clean.ndim - 1)))


def _times(family: Family, count: int, device: str) -> torch.Tensor:
    """Sample logit-normal times and shift the second half of them."""
    t = torch.sigmoid(torch.randn(count, device=device))
    late = t[count // 2 :]
    t[count // 2 :] = family.time_shift * late / (1 + (family.time_shift - 1) * late)
    return t


def train(family: Family, pipeline: Any, budget: Budget, wrong_captions: float, device: str) -> list[float]:
    """Train the text encoders and the transformer in place, by flow matching.

    On a GPU the transformer is compiled, and one that trains alone is recorded as a CUDA graph.

    Args:
        family: family of the pipeline.
        pipeline: pipeline around a trained autoencoder.
        budget: steps, batch size and size of the training set.
        wrong_captions: share of captions with one attribute wrong, left for reinforcement learning to correct.
        device: device to train on.

    Returns:
        The loss at each step. The final weights are averaged over the training.
    """
    torch.manual_seed(0)
    pipeline.to(device)
    frozen = family.frozen_text
    trained = [pipeline.transformer] if frozen else [*text_encoders(pipeline), pipeline.transformer]
    for part in trained:
        part.train()
    if device == "cuda":
        pipeline.transformer.compile()
    _float32_norms(pipeline.transformer)
    backbone = wrap(family, pipeline)
    pool = _Pool(family, pipeline, budget.pool, wrong_captions, device, 1, frozen)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        with _half_precision(device):
            clean, conditioning = pool.draw(budget.batch)
            noise = torch.randn_like(clean)
            t = _times(family, len(clean), device)
            noisy = _noisy(clean, noise, t)
            velocity = backbone.velocity(backbone.transformer, noisy, t, conditioning)
        value = (velocity - (noise - clean)).square().mean()
        return value, value

    losses = fit("backbone", [p for part in trained for p in part.parameters()], loss, budget, RATES, graphed=frozen)
    for part in trained:
        part.eval()
    return losses


def train_aware(family: Family, pipeline: Any, budget: Budget, wrong_captions: float, device: str) -> list[float]:
    """Fine-tune the transformer in place for NVFP4 (see `quantization`).

    Returns:
        Mean squared error of the quantised velocity, relative to the velocity's mean square, at each step.
    """
    torch.manual_seed(1)
    pipeline.to(device)
    transformer = pipeline.transformer.train().requires_grad_(True)
    _float32_norms(transformer)
    backbone = wrap(family, pipeline)
    pool = _Pool(family, pipeline, budget.pool, wrong_captions, device, 2, frozen=True)
    with quantizable(transformer, backbone.policy) as switch:

        def loss() -> tuple[torch.Tensor, torch.Tensor]:
            clean, conditioning = pool.draw(budget.batch)
            noise = torch.randn_like(clean)
            # Half of the times are uniform: a sampler starts at t = 1, which logit-normal times rarely reach.
            t = _times(family, len(clean), device)
            t[::2] = 1 - torch.rand_like(t[::2])
            noisy = _noisy(clean, noise, t)
            velocities = []
            for switch.on in (False, True):
                with _half_precision(device):
                    velocities.append(backbone.velocity(transformer, noisy, t, conditioning))
            plain, quantized = velocities
            target = noise - clean
            distance = (quantized - plain.detach()).square().mean()
            value = (plain - target).square().mean() + 0.3 * (quantized - target).square().mean() + 8 * distance
            return value, distance / plain.square().mean()

        distances = fit("aware", list(transformer.parameters()), loss, budget, AWARE_RATES, graphed=True)
    transformer.eval()
    return distances


def _half_precision(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False)


@torch.no_grad()
def round_weights(family: Family, pipeline: Any, images: int) -> None:
    """Round the weights of the layers quantised at NVFP4 to its grid, in place, on the CPU (see `rounding`)."""
    torch.manual_seed(3)
    pipeline.to("cpu")
    backbone = wrap(family, pipeline)
    clean, conditioning = _Pool(family, pipeline, images, 0.0, "cpu", 3, frozen=True).draw(images)
    t = torch.linspace(1, 0.05, images)
    noisy = _noisy(clean, torch.randn_like(clean), t)
    names = backbone.policy.select(pipeline.transformer)
    rounding.round_weights(
        pipeline.transformer, names, lambda: backbone.velocity(pipeline.transformer, noisy, t, conditioning)
    )
