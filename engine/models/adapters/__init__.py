"""LoRA adapters: small products added to a base model's projections, row by row and never merged."""
