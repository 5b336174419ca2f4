"""What a step costs: time on a device, FLOPs, memory; and the metrics of a job."""
