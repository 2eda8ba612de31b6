"""Many rows of a file or folder, answered by a pipeline: resumable, here or on a cluster."""
