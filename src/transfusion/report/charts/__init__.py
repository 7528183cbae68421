"""All drawing, by matplotlib without a window: charts of the page and figures in files."""
