"""Kernels that the tests of `tiles` run."""
