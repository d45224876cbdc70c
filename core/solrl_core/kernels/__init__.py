"""Fused operations: one Triton kernel each on a GPU, the same arithmetic in plain torch elsewhere."""
