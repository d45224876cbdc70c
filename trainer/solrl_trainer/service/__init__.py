"""Candidate groups of a rollout service, and the adapter versions that it explores them under."""
