"""Training algorithms, one file each: settings, advantages, training data, loss and figures."""
