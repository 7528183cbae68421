"""Drafting: a table for a model that has none, found by trials on a live module, and certified."""
