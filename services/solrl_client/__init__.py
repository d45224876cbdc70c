"""Clients of services: answers read within bounds, addresses, tokens, and rewards that a server computes."""
