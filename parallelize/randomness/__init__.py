"""Randomness that does not depend on the mesh: numbers are a function of a key and of the global element, not of an order.

counter        64 well mixed bits for (seed, site, step) and an element's index, in plain integer ops
normal         the inverse of the normal distribution in correctly rounded ops: the same bits on CPU and CUDA
distributions  what a parameter is drawn from
recording      what initialisers write, recorded on the meta device
recipes        from a tape to distributions, parameter by parameter
pieces         which elements of a parameter lie on this rank
initialise     `initialize(model, seed)`: every rank draws its own elements
stock          the numbers that PyTorch itself draws in one process, one tensor at a time
where, dropout, attention, sites    dropout with one global mask
streams        named streams of ordinary generators, for user code
"""
