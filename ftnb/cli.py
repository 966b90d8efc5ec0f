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
    # What `ftnb lab` does not know, and all that follows `--`, is JupyterLab's.
    cut = given.index("--") if "--" in given else len(given)
    parsed, unknown = parser.parse_known_args(given[:cut])
    parsed.others = unknown + given[cut + 1 :]
    if parsed.others and parsed.run is not _lab:
        parser.error(f"unrecognized arguments: {' '.join(parsed.others)}")
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
        epilog="Other options go to JupyterLab, such as --no-browser, --port 8890 or --allow-root.",
    )
    lab.add_argument("directory", nargs="?", default="ftnb-tutorials", help="default: ./ftnb-tutorials")
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
