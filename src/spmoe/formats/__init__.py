"""Formats in which the weights of experts are stored: on disk, in host memory and in slots."""
