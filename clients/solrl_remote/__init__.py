"""Rewards that another program computes: a reward server, or a vision language model at a chat endpoint."""
