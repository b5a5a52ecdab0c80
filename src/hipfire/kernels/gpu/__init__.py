"""Operations on GPUs: Triton kernels, one file per operation, and the engine that runs them."""
