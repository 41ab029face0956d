"""What `import boost` offers in addition to `boost.nn`: models by name, training by configuration, low-rank swaps, sharding."""
