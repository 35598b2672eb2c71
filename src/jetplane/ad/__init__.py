"""Second-order forward-mode automatic differentiation."""
