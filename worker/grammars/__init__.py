"""What answers are held to: forms and calls as grammars, compiled by llguidance, and who guides by them."""
