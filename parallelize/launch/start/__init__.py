"""Ranks of this machine: started through torch's elastic agent, ended with it, started again after a failure."""
