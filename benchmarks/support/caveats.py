"""Cautions for every results page about the miniatures, as lines of Markdown."""

PREPARED_FOR_NVFP4 = (
    "The miniatures were prepared for NVFP4: the quantised weights of mini-sd3 and mini-flux lie on its grid, so that",
    "BF16 and NVFP4 differ in activations alone, and mini-sana was trained through the rounding. Without preparation",
    "a miniature ranks worse in NVFP4, and about the same in FP8. Large models were not measured.",
)
