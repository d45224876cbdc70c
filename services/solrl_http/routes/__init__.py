"""Routes that every service has."""
