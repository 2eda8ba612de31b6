"""`triptych calibrate`: plans of skipped steps, and what other step caches are tuned with."""
