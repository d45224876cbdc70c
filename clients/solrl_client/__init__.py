"""The client of the rollout service, without torch, and what all clients of services share."""
