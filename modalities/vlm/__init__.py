"""Vision in chat. Importing this package loads neither torch nor FastAPI."""
