"""Evaluation: models measured on tasks, and α chosen by examples."""
