"""Live models: built by their own library, run under hooks, their activations recorded."""
