"""Studies of the optimizers: test functions with known minima, the Rosenbrock study, its figures and its page."""
