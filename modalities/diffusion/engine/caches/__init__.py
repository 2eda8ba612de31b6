"""Step caches on the device: what a picture keeps, and how a plan is calibrated."""
