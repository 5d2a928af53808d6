"""Data parallelism with ZeRO: gradient reduction, optimizer shards, and parameters under `fully_shard`."""
