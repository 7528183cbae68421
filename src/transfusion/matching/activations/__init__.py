"""Evidence from activations: how A's units correspond to B's, from what both compute on the same probes."""
