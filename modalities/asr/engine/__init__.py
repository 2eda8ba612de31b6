"""Speech recognition in the engine process: the model and its stages. Uses torch."""
