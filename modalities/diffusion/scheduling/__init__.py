"""Which pictures step together, and when. Runs in the engine process; loads no torch."""
