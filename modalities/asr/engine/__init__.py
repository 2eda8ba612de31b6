"""Recognition in the engine process: the model and its stages. The place of torch."""
