"""What `import boost` offers beside `boost.nn`: models by name, training by configuration, low-rank swaps, sharding."""
