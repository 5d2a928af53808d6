"""Launch files for schedulers: SLURM, torchrun, Kubernetes, Ray. Torch-free."""
