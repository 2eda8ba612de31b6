"""Chat in the API process: routes, service, templates, pipeline, commands. Loads no torch."""
