"""Step caches on the device: what an image keeps, and how a plan is calibrated."""
