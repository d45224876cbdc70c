"""Candidate kernels beside the product's, at the models' shapes: `python benchmarks/kernel_sweep`.

The candidates were checked in Triton's interpreter and compiled ahead of time for compute capability 9.0; those without
tensor descriptors also for 8.0 and 10.0. No GPU has timed them yet. One that wins on a GPU may move to
`solrl_core.kernels`.

Triton 3.6's interpreter converts float32 to E4M3 wrongly: it rounds ties away from zero, and for one number in 40 it
loses the carry into the exponent. A check of `modulate` there needs a corrected conversion.
"""
