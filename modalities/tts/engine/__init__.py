"""Speech in the engine process: models, codecs, their runner. The place of torch."""
