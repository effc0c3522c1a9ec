"""Plug-ins that run `ltx_kernels.optimize` on the pipelines that inference engines serve."""
