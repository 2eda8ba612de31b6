"""Which images are encoded when, and where. Runs in the engine process; loads no torch."""
