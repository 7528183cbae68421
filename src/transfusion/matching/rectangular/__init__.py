"""Alignment of models of different shapes: other widths, depths, heads, tokens, patches or families."""
