"""Experiments: the published tables and figures, rerun; each is one subcommand of `boost bench`."""
