"""The paged key-value cache: pages, leases and the prefix index."""
