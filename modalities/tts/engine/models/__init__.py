"""Speech models, one folder per family. Importing this package loads no torch."""
