"""What every reader and writer of files needs: checked paths, strict JSON, boxes of tensors."""
