"""Examples that users give, and in ``probes/`` synthetic inputs that need no data."""
