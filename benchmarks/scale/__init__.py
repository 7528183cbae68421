"""How time and memory grow with the size of models, on this machine: see `__main__`."""
