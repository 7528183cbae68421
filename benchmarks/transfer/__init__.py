"""How much of a fine-tune arrives on an independent base: real data, and models trained here."""
