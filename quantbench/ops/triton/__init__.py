"""Kernels in Triton, for CUDA devices. Tests run their arithmetic on the CPU, slowly, by setting
TRITON_INTERPRET=1 before Triton is imported."""
