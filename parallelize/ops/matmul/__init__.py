"""Linears whose collective is overlapped with their matmul, on any process group."""
