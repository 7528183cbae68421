"""Architectures: the axes of every tensor. ``families/`` has one table per family."""
