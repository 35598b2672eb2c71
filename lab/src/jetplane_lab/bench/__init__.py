"""The projected Hessian and the optimizers' steps, timed against other ways to compute them.

Each measurement is a :class:`~jetplane_lab.bench.task.Task` that runs in a process of its own. What a system computes
is compared with double backward before it is timed.
"""
