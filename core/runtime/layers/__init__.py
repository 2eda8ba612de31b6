"""What models are made of: linear, norm, rotary, attention, decoder."""
