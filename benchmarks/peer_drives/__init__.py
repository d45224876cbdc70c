"""Drives of peers' trainers, one module each: peers' own code runs from their clones, beside ours.

A drive has its peer's NAME, a file of its clones by which they are known, MARK, the COMMIT of the clone whose rows have
none, the RECIPES of ours that do the same, the MODELS that it can train, whether it COMPILES the model to sample, STUBS
(what is replaced: by what) beside those of all, `constants(model, recipe)`, facts that its settings fix, by column of
the page, and `run(clone, work, turns)`.
"""
