"""Other people's programs: tiny models of well-known packages, and whether their planes are exact.

    python -m benchmarks.programs --out benchmarks/results/programs.json --page docs/programs.md

builds every model from a config, without a download, and compares slopes and curvature along random directions of all
its parameters with backprop and double backward, in float64. Each program runs in a process of its own with a limit of
time and memory. What is there already is not run again; `--only transformers/bert` runs what begins so.
"""
