"""The API process's side of vision: prompts with images, pipeline, commands. Loads no torch."""
