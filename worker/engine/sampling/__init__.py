"""How tokens are drawn, for all rows at once."""
