"""`python -m ftnb.supervisor`: started by `Session.start`, detached from the notebook.

With `--adopt` it takes over from a supervisor that is gone; every connected notebook starts one then.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import Any

from ftnb.supervisor import adoption
from ftnb.supervisor.server import Supervisor
from ftnb.wire import paths, proc, reaper
from ftnb.wire.paths import EXIT_CANNOT_ADOPT, EXIT_NAME_TAKEN


def main() -> int:
    parser = argparse.ArgumentParser(prog="ftnb.supervisor", description="Owns one ftnb cluster.")
    parser.add_argument("--name", default="default")
    parser.add_argument("--adopt", action="store_true", help="take over the cluster of a supervisor that is gone")
    parser.add_argument("--lost", metavar="PID:STARTED", help="the supervisor to replace, should it still be there")
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"])
    parser.add_argument("--linger", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    # One supervisor per name: the lock is held as long as this process lives, and nobody else can take it.
    if args.adopt:
        pid, _, started = (args.lost or "").partition(":")
        return _adopt(args.name, proc.ProcessId(int(pid), started) if pid else None)
    if adoption.open_lock(paths.cluster_dir(args.name)) is None:
        print(f"A cluster named {args.name!r} is being started or runs already.", file=sys.stderr)
        return EXIT_NAME_TAKEN
    options: dict[str, Any] = {
        "num_ranks": args.num_ranks, "num_spares": args.spares, "threads": args.threads, "backend": args.backend,
        "linger_s": args.linger, "keep": args.keep, "profile": args.profile,
    }
    return asyncio.run(Supervisor(args.name, options).serve())


def _adopt(name: str, lost: proc.ProcessId | None) -> int:
    directory = paths.cluster_dir(name)
    try:
        recorded = adoption.take_office(directory, lost)
    except adoption.InCharge:
        return EXIT_NAME_TAKEN
    except adoption.CannotAdopt as error:
        print(f"The cluster {name!r} cannot be taken over ({error}); what is left of it is ended.", file=sys.stderr)
        reaper.reap(directory, locked=True)
        return EXIT_CANNOT_ADOPT
    return asyncio.run(Supervisor(name, recorded["options"], recorded).serve())


if __name__ == "__main__":
    sys.exit(main())
