"""Which images step together, and when. Runs in the engine process; loads no torch."""
