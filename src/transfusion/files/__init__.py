"""Checkpoints on disk: headers first, bytes when needed; written in a staging folder, published whole."""
