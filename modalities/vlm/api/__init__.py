"""Vision in the API process: prompts with images, pipeline, commands. Loads no torch."""
