"""How the decoder layers of language models run, and how their attention reads the KV cache."""
