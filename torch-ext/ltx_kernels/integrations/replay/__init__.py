"""Calls that are taken again: recorded calls and CUDA graphs."""
