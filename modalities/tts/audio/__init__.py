"""Audio on its way out and in: containers, uploaded clips, resampling, speed. Knows no torch."""
