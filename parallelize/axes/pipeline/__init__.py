"""Pipeline parallelism: splitting a model into stages, schedules, and steps over microbatches."""
