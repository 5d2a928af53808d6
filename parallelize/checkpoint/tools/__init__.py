"""The command `parallelize checkpoint`: inspect, verify, reshape and convert checkpoints, on one process."""
