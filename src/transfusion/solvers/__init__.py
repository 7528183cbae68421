"""Solvers: from evidence about an axis to a map of it."""
