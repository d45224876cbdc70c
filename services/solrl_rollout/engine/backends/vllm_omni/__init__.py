"""vLLM-Omni's diffusion engine as a backend: its transformer and parallelism, our noise, solvers and decoder."""
