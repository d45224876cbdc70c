"""Drives of peers' trainers, one module each: peers' own code runs from their clones, beside ours.

A drive has its peer's NAME, a file of its clones by which they are known, MARK, the RECIPE of ours that does the same,
the MODELS that it can train, STUBS (what is replaced: by what) beside those of all, and `run(clone, work, turns)`.
"""
