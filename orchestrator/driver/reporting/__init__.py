"""What the driver reports besides the console: records, Prometheus, the metadata of a Ray job."""
