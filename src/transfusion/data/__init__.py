"""Data: examples that users give, and ``probes/``, the synthetic inputs that need no data."""
