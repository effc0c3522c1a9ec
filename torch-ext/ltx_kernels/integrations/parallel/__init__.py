"""Attention and guidance over several GPUs."""
