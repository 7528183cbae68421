"""Reports: one page of HTML about a run, figures, descriptions."""
