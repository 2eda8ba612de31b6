"""From logits to tokens: parameters, the logits pipeline and keyed randomness."""
