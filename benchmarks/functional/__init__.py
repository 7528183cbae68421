"""Time and memory of functional alignment, against its floor."""
