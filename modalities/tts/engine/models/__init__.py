"""Speech models, a module or a folder per family. Importing this package loads no torch."""
