"""The reward service: any rewards of the registry over HTTP, for rollout services and trainers."""
