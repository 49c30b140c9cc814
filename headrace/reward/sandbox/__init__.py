"""Processes with walls: user code runs in them with limits on time, memory, processes, files, network and output."""
