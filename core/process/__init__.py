"""Process-wide helpers: threads, logs, metrics, allocator settings, files. No torch."""
