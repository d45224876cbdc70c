"""The engine: admission, the fair queue, generation and scoring of candidates."""
