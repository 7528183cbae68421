"""Solvers: from a gain matrix to a map."""
