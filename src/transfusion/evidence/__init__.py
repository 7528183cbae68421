"""Evidence: how much the units of A resemble those of B."""
