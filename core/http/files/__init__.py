"""Files that callers keep here: `/v1/files`."""
