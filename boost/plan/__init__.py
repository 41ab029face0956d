"""The performance model: step time and memory for a configuration, predicted without running it."""
