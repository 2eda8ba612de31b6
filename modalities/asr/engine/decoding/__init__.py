"""How families turn what an encoder heard into tokens."""
