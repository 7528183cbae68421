"""Matching: how A's units correspond to B's. Evidence from weights or activations, then a solver."""
