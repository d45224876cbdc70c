"""Routes of the reward service."""
