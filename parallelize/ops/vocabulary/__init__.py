"""Cross entropy and softmax over a vocabulary that is sharded over ranks."""
