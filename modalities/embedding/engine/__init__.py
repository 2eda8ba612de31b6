"""Embeddings in the engine process: encoders and their runner. The place of torch."""
