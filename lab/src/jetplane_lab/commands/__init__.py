"""The study's sub-commands of ``jetplane``, one module for each; the entry points in pyproject.toml name them."""
