"""The families that our decoder runs: a small file for each group of relatives."""
