"""Triton kernels, each beside a plain PyTorch twin that defines it; imported only where there is a CUDA device."""
