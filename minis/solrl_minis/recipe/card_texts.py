"""What the model cards say, with places for the figures."""

BACKBONE = """# {name}

{about} {parameters:.2f} M parameters in BF16, 64 px.
Trained from nothing on rendered scenes by `python -m solrl_minis.recipe`; no photograph, no other model's output.

| measured by `python -m solrl_minis.recipe` and `python -m solrl_minis.recipe.card` | |
|---|---|
| strict accuracy, held-out prompts, {steps} steps, BF16 ({images} images) | {strict:.1%} |
| graded | {graded:.3f} |
{rows}
| autoencoder, held-out scenes | {psnr_db:.1f} dB |

The accuracy is low on purpose, to leave room for reinforcement learning: a share of the captions it was trained on had
one attribute wrong ({goes}). Held-out combinations (15 % of each kind) were never shown, neither as image nor as text.

![loss curves](../../../../docs/minis/{name}-losses.png)

![one sample for each of the first held-out prompts](../../../../docs/minis/{name}-samples.png)

Licence: Apache-2.0, as the project.
"""

CLIP = """# {name}

A miniature CLIP (transformers' `CLIPModel`, {parameters:.2f} M parameters in BF16, 64 px, patches of 8, 24 text
tokens) for the shapes world: the reward `clipscore` of the miniatures. Trained by `python -m solrl_minis.recipe` to
tell captions that are true of an image from those that are not, and images from images: on rendered scenes, half of
them through an autoencoder with noisy latents, and on what the three backbones made; against captions that differ in
one attribute, and images whose shapes have no name. **What a generated image shows was read from it by the verifier's
own eyes** (`find_objects`); which image is better it was never told. Held-out combinations were never captioned.

| measured by `python -m solrl_minis.recipe.card` | |
|---|---|
| held-out prompts: right image beats one that differs in one attribute | {agreement:.1%} |

| agreement with the verifier's order of images, by the same, on the pairs of the tuned rewards' cards | |
|---|---|
{rows}

![loss curve](../../../../docs/minis/{name}-losses.png)

Licence: Apache-2.0, as the project.
"""

JUDGE = """# {name}

{about} {parameters:.2f} M parameters in BF16, 64 px: the reward `{reward}` of the miniatures. Tuned for
{seconds:.0f} s on one GPU by `python -m solrl_minis.recipe` on preferences between images of one prompt of the shapes
world: rendered ones (right, with one attribute changed, blurred, noisy) and ones that the three backbones made.
**The verifier stood in for the people whose choices the real model learned from**, on training prompts alone; so this
reward and the verifier are not independent. Held-out combinations were never shown. The mini-clip that the shipped
one started from had seen rendered images alone.

| agreement with the verifier's order, measured by `python -m solrl_minis.recipe.card` | |
|---|---|
{rows}

![loss curve](../../../../docs/minis/{name}-losses.png)

Licence: Apache-2.0, as the project.
"""

ABOUT = {
    "mini-sana": """A miniature of SANA for the shapes world: the real classes (`SanaPipeline`: AutoencoderDC,
SanaTransformer2DModel, Gemma-2 text encoder, Gemma tokenizer), 8×8×8 latents, 16 image tokens. After the flow matching
a third stage taught the transformer to keep its course in NVFP4 (`recipe/quantization.py`); the shipped weights went
through it twice, the recipe now does it in one go. The first block's
cross-attention stays in BF16, since it costs the ranking most.""",
    "mini-sd3": """A miniature of Stable Diffusion 3.5 for the shapes world: the real classes
(`StableDiffusion3Pipeline`: AutoencoderKL, SD3Transformer2DModel with normalised queries and keys, two CLIP text
encoders with projection, T5 encoder), 16×16×4 latents, 64 image tokens. The weights that NVFP4 rounds were put on its
grid (`recipe/rounding.py`), so BF16 and NVFP4 differ in activations alone; the modulation of the image stream and the
last blocks' most sensitive projections stay in BF16. The shipped backbone was trained in two goes, the first without
the shifted times (`family.py`), the second with them; the recipe has them from the start.""",
    "mini-flux": """A miniature of FLUX.1-dev for the shapes world: the real classes (`FluxPipeline`: AutoencoderKL,
FluxTransformer2DModel with guidance embedding, CLIP and T5 text encoders), 16×16×4 latents, 64 image tokens. It takes
its autoencoder, CLIP and T5 from mini-sd3, as FLUX.1 has CLIP-L and T5 in common with Stable Diffusion 3, and was told
guidance 1.0 throughout: other values mean nothing to it. The weights that NVFP4 rounds were put on its grid
(`recipe/rounding.py`), so BF16 and NVFP4 differ in activations alone; the modulation of the image stream and some
attention projections stay in BF16.""",
    "mini-pickscore": "A miniature PickScore: transformers' `CLIPModel`, mini-clip tuned on preferences,",
    "mini-hpsv2": """A miniature HPSv2: a CLIP with exact GELU in open_clip's own checkpoint format, mini-clip tuned on
preferences,""",
    "mini-imagereward": """A miniature ImageReward: BLIP's image encoder, its text encoder looking at the image, and the
linear head whose output is standardised over what it was trained on; the image encoder starts from mini-clip's,""",
}
