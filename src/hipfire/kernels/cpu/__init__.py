"""The Numba kernels of the operations, and the engine that runs them."""
