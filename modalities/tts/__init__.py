"""Speech. Importing this package loads neither torch nor FastAPI."""
