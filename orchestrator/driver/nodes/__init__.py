"""The nodes of the cluster: their reports, the watch of their processes, the upload of their files."""
