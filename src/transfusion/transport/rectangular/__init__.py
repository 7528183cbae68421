"""Transport between models of different shapes."""
