"""Chat and text completion. Importing this package loads neither torch nor FastAPI."""
