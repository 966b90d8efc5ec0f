"""The `ftnb` command: `ftnb demo` in a terminal, `ftnb lab` to open the tutorials."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

import ftnb
from ftnb.errors import FtnbError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    others = _lab_options(given)
    parsed = parser.parse_args(given[: len(given) - len(others)])
    parsed.others = [word for word in others if word != "--"]
    # Asked to end from outside: leave through the same `finally` blocks as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        return parsed.run(parsed)
    except FtnbError as error:
        print("\n".join(error._render_traceback_()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _lab_options(given: list[str]) -> list[str]:
    """What JupyterLab gets of `ftnb lab [DIR] …`: everything from the first option, or from `--`, on."""
    if given[:1] != ["lab"] or {"-h", "--help"} & set(given[1:3]):
        return []
    first = 1 if len(given) > 1 and given[1].startswith("-") else 2
    return given[first:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftnb", description="Fault-tolerant distributed PyTorch training, from a notebook."
    )
    parser.add_argument("--version", action="version", version=f"ftnb {ftnb.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train on a few ranks, lose one half-way, and see the report")
    demo.add_argument("-n", "--num-ranks", type=int, help="ranks (4, fewer in a small container)")
    demo.add_argument("--steps", type=int, default=400, help="updates to make (default 400)")
    demo.set_defaults(run=_demo)
    lab = commands.add_parser(
        "lab", help="copy the tutorials and open them in JupyterLab",
        usage="ftnb lab [-h] [DIRECTORY] [options of JupyterLab]",
        epilog="Options go to JupyterLab, such as --no-browser, --port 8890 or --allow-root (to run it as root).",
    )
    lab.add_argument(
        "directory", nargs="?", default="ftnb-tutorials", metavar="DIRECTORY", help="default: ./ftnb-tutorials"
    )
    lab.set_defaults(run=_lab)
    return parser


def _demo(parsed: argparse.Namespace) -> int:
    from ftnb.demo import demo

    return demo(parsed.num_ranks, parsed.steps)


def _lab(parsed: argparse.Namespace) -> int:
    from ftnb.lab import lab

    return lab(parsed.directory, parsed.others)


def _end(signum: int, _: Any) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
