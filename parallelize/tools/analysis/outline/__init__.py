"""Models outlined: a decoder by its sizes, and what each part of it does under a set of kernels."""
