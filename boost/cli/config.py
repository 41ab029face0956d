"""`boost config`: prints a fully resolved configuration, or explains why it is invalid."""

import argparse
import json

from boost.cli.terminal import print_rows
from boost.config import load, presets, to_toml
from boost.config.architecture import parameter_count
from boost.config.load import fields, summary, type_name
from boost.format import format_count


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "config",
        description="Prints a preset or a file with all defaults filled in, as TOML for 'boost train'.\n"
        "An error is one line with the field, its value and the nearest valid value.",
        epilog="examples:\n"
        "  boost config                       list the presets\n"
        "  boost config demo                  the demo, fully resolved\n"
        "  boost config my.toml --check       validate a file\n"
        "  boost config cola-1b --parallel.tp 4 --model.ffn_dim 5472 > run.toml\n"
        "  boost config --fields              every key with its type, default and meaning",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="preset name or TOML file; without it, list the presets"
    )
    parser.add_argument("--check", action="store_true", help="only validate the configuration")
    parser.add_argument("--fields", action="store_true", help="list every key with its documentation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of TOML or a table")
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.fields:
        _print_fields(args.json)
    elif args.config is None and not args.overrides:
        _print_presets(args.json)
    else:
        config = load(args.config, args.overrides)
        if args.check:
            print(f"{args.config or 'the defaults with these overrides'}: valid")
        elif args.json:
            print(json.dumps(config.model_dump(), indent=2))
        else:
            print(to_toml(config), end="")
    return 0


def _print_presets(as_json: bool) -> None:
    configs = {name: load(name) for name in presets()}
    counts = {name: parameter_count(config.model) for name, config in configs.items()}
    rows, cells = [], []
    for name in sorted(counts, key=lambda name: (name != "demo", name.partition("-")[0], counts[name])):
        model, parallel, train = configs[name].model, configs[name].parallel, configs[name].train
        row = {"preset": name, "family": model.family, "parameters": counts[name]}
        row |= {field: getattr(model, field) for field in ("dim", "ffn_dim", "layers", "heads", "rank")}
        rows.append(row | {"tp": parallel.tp, "pp": parallel.pp, "seq_len": train.seq_len, "what": summary(name)})
        numbers = (model.dim, model.layers, model.rank or "", parallel.tp, train.seq_len)
        cells.append((name, model.family, format_count(counts[name]), *numbers, summary(name)))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    sizes = ("params", "dim", "layers", "rank", "tp", "seq")
    print_rows(("preset", "family", *sizes, "what"), cells, right=sizes, piped_width=150)


def _print_fields(as_json: bool) -> None:
    rows = []
    for key, info in fields():
        default, meaning = None if info.is_required() else info.default, " ".join((info.description or "").split())
        rows.append({"key": key, "type": type_name(info), "default": default, "meaning": meaning})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        default = "" if row["default"] is None else f"  [{row['default']}]"
        print(f"{row['key']}: {row['type']}{default}\n    {row['meaning']}")
