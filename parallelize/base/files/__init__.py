"""What every reader and writer of files needs: checked paths, strict JSON, nodes of YAML with their lines, boxes of
tensors, digests."""
