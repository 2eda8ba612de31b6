"""Parts of models: linear, norm, rotary, attention, decoder."""
