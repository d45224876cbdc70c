"""Tests of the product. `support` has what tests of several folders share, also with benchmarks."""
