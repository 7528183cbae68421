"""What a refinement by answers takes, and how much of a fine-tune arrives."""
