"""Cautions for every results page about the miniatures, as lines of Markdown."""

PREPARED_FOR_NVFP4 = (
    "The miniatures were prepared for NVFP4: the quantised weights of mini-sd3 and mini-flux lie on its grid, so that",
    "BF16 and NVFP4 differ in activations alone, and mini-sana was trained through the rounding. A small model that",
    "was not prepared ranks worse, and nothing here says how a large one ranks.",
)
VERIFIER = (
    "The verifier, which gives the strict accuracy, is not independent of the rewards: it labelled the images that",
    "mini-clip was tuned on, and graded the pairs that the other three rewards learned from (training prompts only).",
)
