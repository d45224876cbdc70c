"""Groups and samples that a rollout service makes, and the versions that it makes them under."""
