"""Runtimes of the layouts in `boost.config.layouts`, one file each."""
