"""π: a map for every axis (permutation, rotation or transport plan), its file, and where it comes from."""
