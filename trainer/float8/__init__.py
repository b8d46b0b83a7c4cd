"""Linear layers whose matrix products have 8 bits."""

ROWS = 16
"""GPUs multiply matrices of 8 bits whose sizes are multiples of this (https://docs.nvidia.com/cuda/cublas/)."""
MX_BLOCK = 32
"""Neighbouring numbers that share a scale in the formats of https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf."""
