"""Recognition in the API process: routes, service, pipeline, command. Loads no torch."""
