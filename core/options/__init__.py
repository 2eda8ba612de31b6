"""Options: how they are declared, read, documented, and refused. Loads no torch."""
