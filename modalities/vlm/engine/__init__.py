"""The engine process's side of vision: encoders, their cache, the head. Uses torch."""
