"""Kernels in Triton, for CUDA devices; with TRITON_INTERPRET=1, set before anything imports Triton,
they run on the CPU, slowly, to have their arithmetic tested."""
