"""Bundles of `triptych warm-cache`: what a start would otherwise fetch, convert or compile."""
