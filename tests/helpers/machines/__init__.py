"""Machines and commands: hosts, nodes, disks and processes."""
