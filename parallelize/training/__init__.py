"""What a training script calls: `parallelize_module` and `parallelize_model` in the order of their work, data, trainers
of other libraries."""
