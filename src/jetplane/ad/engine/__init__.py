"""The interpreter of operations on jets: rows per storage, where second order begins, stops and guards."""
