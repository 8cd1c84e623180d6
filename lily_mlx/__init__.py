"""lily-mlx: custom Metal kernels for Qwen3.5/3.6-MoE in mlx-lm."""
