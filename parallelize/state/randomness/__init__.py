"""Randomness that does not depend on the mesh: initialization, dropout, and named random streams.

init                    initialize parameters from recorded or given distributions
dropout                 dropout with one global mask, and what else a forward draws
streams                 named streams of ordinary generators, for user code

Initialization and dropout use the counter-based generator of `ops/random`: a random number is a function of a key and
of an element's global index, not of the order of draws.
"""
