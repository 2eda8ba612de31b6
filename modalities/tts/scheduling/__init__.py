"""Which stream goes next, by playback deadlines. Runs in the engine process; loads no torch."""
