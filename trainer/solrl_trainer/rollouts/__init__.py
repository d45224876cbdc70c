"""Groups and samples of an iteration, and how this device makes them."""
