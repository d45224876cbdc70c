"""The miniature SANA pipeline: text encoder and transformer trained together by flow matching."""

import itertools
import math
import time
from typing import Any

import torch
from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from solrl_core.precision import LayerPolicy
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from solrl_minis.recipe.data import Source
from solrl_minis.recipe.quantization import quantizable
from solrl_minis.recipe.tokenizers import gemma_tokenizer

TEXT_TOKENS = 16

NO_CAPTIONS = 0.05
AWARE_RATE = 5e-4


def build(autoencoder: AutoencoderDC) -> SanaPipeline:
    """An untrained pipeline of the shipped shape around a trained autoencoder."""
    tokenizer = gemma_tokenizer()
    text_encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=24,
            query_pre_attn_scalar=24,
            max_position_embeddings=64,
            sliding_window=64,
            attn_implementation="eager",
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    transformer = SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=6,
        attention_head_dim=32,
        num_layers=5,
        num_cross_attention_heads=6,
        cross_attention_head_dim=32,
        cross_attention_dim=192,
        caption_channels=96,
        mlp_ratio=2.0,
        sample_size=8,
        patch_size=2,
        interpolation_scale=1,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoder,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )


SETTINGS: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "max_sequence_length": TEXT_TOKENS,
    "complex_human_instruction": [],
    "quantize": [r"^transformer_blocks\."],
    "keep": [],
    "rewards": {"clipscore": {"model": "../mini-clip"}},
}
"""What `solrl.json` beside the pipeline says."""


class Captions:
    """Token ids of each caption, made once."""

    def __init__(self, tokenizer: GemmaTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.padding_side = "right"

    def encode(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, 16] token ids and their mask."""
        out = self._tokenizer(texts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt")
        return out.input_ids, out.attention_mask


@torch.no_grad()
def _pool(
    pipeline: SanaPipeline, source: Source, count: int, wrong_captions: float, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents with token ids and masks of their captions, a share of which has one attribute wrong."""
    captions = Captions(pipeline.tokenizer)
    latents, texts = [], []
    for start in range(0, count, 2048):
        combinations = source.draw(min(2048, count - start))
        images = source.images(combinations, device) * 2 - 1
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            encoded = pipeline.vae.encode(images).latent
        latents.append(encoded.float() * pipeline.vae.config.scaling_factor)
        for combination in combinations:
            dice = source.rng.random()
            if dice < NO_CAPTIONS:
                texts.append("")
            else:
                wrong = dice < NO_CAPTIONS + wrong_captions
                texts.append(source.caption(source.change(combination) if wrong else combination))
    ids, mask = captions.encode(texts)
    return torch.cat(latents), ids.to(device), mask.to(device)


def train(
    autoencoder: AutoencoderDC,
    steps: int,
    batch: int,
    pool: int,
    wrong_captions: float,
    device: str,
    seed: int = 0,
) -> tuple[SanaPipeline, list[float]]:
    """Train the text encoder and the transformer.

    Args:
        autoencoder: trained; makes the latents.
        steps: optimiser steps.
        batch: images a step.
        pool: images drawn once and trained on again and again.
        wrong_captions: share of captions with one attribute wrong: what reinforcement learning is later to unlearn.
        device: where to train.
        seed: of everything random.

    Returns:
        The pipeline with averaged weights, and the loss at each step.
    """
    torch.manual_seed(seed)
    pipeline = build(autoencoder)
    pipeline.to(device)
    text_encoder, transformer = pipeline.text_encoder.train(), pipeline.transformer.train()
    if device == "cuda":
        transformer.compile()
    latents, ids, mask = _pool(pipeline, Source(seed + 1), pool, wrong_captions, device)
    parameters = [*text_encoder.parameters(), *transformer.parameters()]
    averaged = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.99), fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.2e-3, total_steps=steps, pct_start=0.05, final_div_factor=100
    )
    losses = []
    for step in range(steps):
        pick = torch.randint(len(latents), (batch,), device=device)
        clean = latents[pick]
        noise = torch.randn_like(clean)
        t = torch.sigmoid(torch.randn(batch, device=device))
        noisy = torch.lerp(clean, noise, t[:, None, None, None])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            encoded = text_encoder(ids[pick], attention_mask=mask[pick])[0]
            velocity = transformer(
                noisy, encoder_hidden_states=encoded, encoder_attention_mask=mask[pick], timestep=t * 1000
            ).sample
        loss = (velocity.float() - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.9995, (step + 1) / (step + 20))
        torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
        losses.append(loss.detach())
        if step % 500 == 0:
            print(f"backbone step {step} of {steps}: loss {float(losses[-1]):.4f}", flush=True)
    with torch.no_grad():
        for parameter, average in zip(parameters, averaged, strict=True):
            parameter.copy_(average)
    text_encoder.eval(), transformer.eval()
    return pipeline, torch.stack(losses).tolist()


def train_aware(
    pipeline: SanaPipeline,
    steps: int,
    batch: int,
    pool: int,
    wrong_captions: float,
    device: str,
    seconds: float = math.inf,
    seed: int = 1,
) -> list[float]:
    """Fine-tune the transformer in place so that NVFP4 follows full precision (see `quantization`).

    Ends after `steps` or `seconds`, whichever comes first; the learning rate follows what is nearer its end.

    Returns:
        Mean squared distance of the two velocities, relative to the velocity's mean square, at each step.
    """
    torch.manual_seed(seed)
    pipeline.to(device)
    text_encoder, transformer = pipeline.text_encoder.eval(), pipeline.transformer.train()
    latents, ids, mask = _pool(pipeline, Source(seed + 1), pool, wrong_captions, device)
    distances = []
    start = time.monotonic()
    with quantizable(transformer, LayerPolicy(quantize=tuple(SETTINGS["quantize"]))) as switch:
        parameters = list(transformer.parameters())
        averaged = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.AdamW(parameters, lr=AWARE_RATE, weight_decay=0.01, betas=(0.9, 0.99))
        for step in range(steps):
            progress = max(step / steps, (time.monotonic() - start) / seconds)
            if progress >= 1:
                break
            rate = min(1.0, progress / 0.05) * 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = AWARE_RATE * rate
            pick = torch.randint(len(latents), (batch,), device=device)
            clean = latents[pick]
            noise = torch.randn_like(clean)
            # Half of the times evenly, because a sampler begins at t = 1, which the other half hardly sees.
            t = torch.sigmoid(torch.randn(batch, device=device))
            t[: batch // 2] = 1 - torch.rand(batch // 2, device=device)
            noisy = torch.lerp(clean, noise, t[:, None, None, None])
            with torch.no_grad():
                encoded = text_encoder(ids[pick], attention_mask=mask[pick])[0]
            velocities = []
            for switch.on in (False, True):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    out = transformer(
                        noisy, encoder_hidden_states=encoded, encoder_attention_mask=mask[pick], timestep=t * 1000
                    )
                velocities.append(out.sample.float())
            plain, quantized = velocities
            target = noise - clean
            distance = (quantized - plain.detach()).square().mean()
            loss = (plain - target).square().mean() + 0.3 * (quantized - target).square().mean() + 8 * distance
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            decay = min(0.999, (step + 1) / (step + 20))
            torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
            distances.append((distance / plain.square().mean()).detach())
            if step in (20, 99) or step % 500 == 0:
                figures = f"distance {float(distances[-1]):.5f}, loss {float(loss):.4f}"
                print(f"aware step {step} of {steps}: {figures}, {time.monotonic() - start:.1f} s", flush=True)
        with torch.no_grad():
            for parameter, average in zip(parameters, averaged, strict=True):
                parameter.copy_(average)
    transformer.eval()
    return torch.stack(distances).tolist()


@torch.no_grad()
def sample(pipeline: SanaPipeline, prompts: list[str], steps: int, device: str, seed: int = 0) -> torch.Tensor:
    """Images [N, 3, 64, 64] in [0, 1] by Euler steps on unshifted sigmas, guidance 1.0."""
    ids, mask = (x.to(device) for x in Captions(pipeline.tokenizer).encode(prompts))
    encoded = pipeline.text_encoder(ids, attention_mask=mask)[0]
    x = torch.randn(len(prompts), 8, 8, 8, generator=torch.Generator().manual_seed(seed)).to(device)
    sigmas = torch.linspace(1, 0, steps + 1).tolist()
    for now, then in itertools.pairwise(sigmas):
        t = torch.full((len(prompts),), now * 1000, device=device)
        velocity = pipeline.transformer(
            x, encoder_hidden_states=encoded, encoder_attention_mask=mask, timestep=t
        ).sample
        x = x + (then - now) * velocity
    decoded = pipeline.vae.decode(x / pipeline.vae.config.scaling_factor).sample
    images: torch.Tensor = (decoded / 2 + 0.5).clamp(0, 1)
    return images
