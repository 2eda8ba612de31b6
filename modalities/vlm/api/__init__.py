"""Vision in the API process: prompts with pictures, pipeline, commands. Loads no torch."""
