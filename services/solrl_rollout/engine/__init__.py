"""The engine: requests as chunks, the fair queue, adapters, generation and scoring of candidates."""
