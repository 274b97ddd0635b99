"""From a network to certified accuracy: logits with their rounding, radii, accuracy, attacks."""
