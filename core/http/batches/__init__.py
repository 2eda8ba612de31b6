"""Files of requests that are answered in the background: `/v1/batches`."""
