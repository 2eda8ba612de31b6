"""Embeddings in the engine process: encoders and their runner. Uses torch."""
