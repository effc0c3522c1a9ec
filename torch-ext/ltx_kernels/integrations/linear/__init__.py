"""Linear layers: together in one product, in fp8, with adapters."""
