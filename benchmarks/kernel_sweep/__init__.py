"""Candidate kernels beside the product's, at the models' shapes: `python benchmarks/kernel_sweep`.

The candidates were checked in the interpreter of Triton 3.6 and compiled ahead of time for compute capabilities 9.0
and 10.0; linear attention and the depthwise kernel also for 8.0. No GPU has timed them yet. One that wins on a GPU may
move to `solrl_core.kernels`.

Triton 3.6's interpreter converts float32 to E4M3 wrongly: it rounds ties away from zero, and for one number in 40 it
loses the carry into the exponent. A check of `modulate` there needs a corrected conversion.
"""
