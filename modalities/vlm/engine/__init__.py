"""Vision in the engine process: encoders, their cache, the head. The place of torch."""
