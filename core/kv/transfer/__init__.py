"""Pages of the key-value cache on their way between engines of different roles."""
