"""Kernels from source to a running back-end. The only package that names a back-end API."""
