"""How the time and the memory of every verb grow with parameters: see `__main__`."""
