"""Measuring Lily against stock MLX-LM: ``lily-mlx bench`` and what it is made of.

In a wheel this package is ``lily_mlx.bench``, in a checkout ``bench``; its modules import one another
relatively and everything else absolutely, so that both work.
"""
