"""Which dims of a forward are the same axis of the computation, and which operations need all of one."""
