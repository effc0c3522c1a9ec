"""Linear layers: several in one product, fp8 weights and files of them, LoRA adapters."""
