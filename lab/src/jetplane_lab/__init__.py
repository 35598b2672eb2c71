"""The study: data, models, methods, training, tuning, reports and benchmarks, on public names of jetplane only."""
