"""Several processes, started by torchrun, that train one run: their ranks, connections and collectives."""
