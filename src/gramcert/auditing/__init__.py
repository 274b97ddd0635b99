"""A whole model, from memory or from a file: its certified Lipschitz constant, where it comes from, and a proof."""
