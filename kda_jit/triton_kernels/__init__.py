"""Triton kernels. Importing a module of this package imports Triton; `backends.triton` does."""
