"""The nearest layer with a smaller norm, and steps of a given norm."""
