"""Files that callers store on the server: `/v1/files`."""
