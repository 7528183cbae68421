"""Transport: B + α·π(τ), as a checkpoint that loads where B does, or as an adapter."""
