"""Training of certified networks: images, networks, configurations, the loop."""
