"""Plug-ins that run `ltx_fused.optimize` on the pipelines that inference engines serve."""
