"""The performance model: arithmetic that imports the configuration only."""
