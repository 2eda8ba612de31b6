"""Images in the API process: routes, service, pipeline, commands. Loads no torch."""
