"""Models: a checkpoint, or a module in memory, whose every tensor is understood."""
