"""Images made of sprites, and true captions of them: training data of the embedded image models."""
