"""The checkpoint files: safetensors, manifest, digests, JSON, and the folder of a run. No models and no ranks."""
