"""Bases that are trained on the spot, two at a time, from data that the registries hold."""
