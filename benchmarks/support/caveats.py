"""Cautions for every results page about the miniatures, as lines of Markdown."""

PREPARED_FOR_NVFP4 = (
    "The miniatures were prepared for NVFP4: the quantised weights of mini-sd3 and mini-flux lie on its grid, so that",
    "BF16 and NVFP4 differ in activations alone, and mini-sana was trained through the rounding. Without preparation",
    "a miniature ranks worse in NVFP4, and about the same in FP8. Large models were not measured.",
)
STRICT_ACCURACY = (
    "Strict accuracy is the share of images that show exactly what their prompt says. Unless a judge is named, it is",
    "the verifier's, which is not independent of the rewards: it labelled the images that mini-clip was tuned on, and",
    "graded the pairs that the other three rewards learned from (training prompts only). The judge is a detector",
    "trained on rendered scenes alone, which no reward has seen",
    "([card](../../minis/solrl_minis/weights/mini-judge/README.md)). A table without it is older.",
)
