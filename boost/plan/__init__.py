"""The performance model: step time and memory of a configuration, predicted without running it."""
