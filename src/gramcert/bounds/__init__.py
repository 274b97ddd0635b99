"""The paper's algorithms: tensors in, differentiable tensors out. Bounds in exact arithmetic, rounding not included."""
