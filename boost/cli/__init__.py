"""The command line: one file per command, each with `add_parser(subparsers) -> parser` and `run(args) -> int | None`."""
