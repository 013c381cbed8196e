"""Triton kernels, each with a PyTorch reference (`*_plain`); import them only where Triton is installed."""
