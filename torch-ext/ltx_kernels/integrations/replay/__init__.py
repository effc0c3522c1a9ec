"""Calls that are captured once and replayed: recorded calls of blocks, and CUDA graphs of whole models."""
