"""Evidence from the weights: how much the units of A resemble those of B."""
