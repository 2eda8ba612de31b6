"""Models of a start, and bundles of `triptych warm-cache`: weights and kernels prepared for it."""
