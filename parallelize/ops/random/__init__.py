"""Random numbers as a function of a key and a global index, equal on any rank and device."""
