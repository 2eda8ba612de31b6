"""`triptych calibrate`: plans of skipped steps, and settings of other step caches."""
