"""The device: what it can do, its clock and its memory. A place of torch."""
