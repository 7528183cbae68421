"""Scores of models on tasks, and α chosen with labelled examples."""
