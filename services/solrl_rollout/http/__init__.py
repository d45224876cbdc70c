"""Routes of the rollout service, its status page and the page's data."""
