"""How the attentions of diffusion models run: joint, self and cross."""
