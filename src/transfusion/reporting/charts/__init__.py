"""Charts: inline SVG in the colours of the page."""
