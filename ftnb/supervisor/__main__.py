"""`python -m ftnb.supervisor`: started by `Session.start`, detached from the notebook."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import sys

from ftnb.supervisor.server import Supervisor
from ftnb.wire import paths
from ftnb.wire.paths import EXIT_NAME_TAKEN


def main() -> int:
    parser = argparse.ArgumentParser(prog="ftnb.supervisor", description="Owns one ftnb cluster.")
    parser.add_argument("--name", default="default")
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl"])
    parser.add_argument("--linger", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    # One supervisor per name: the lock is held as long as this process lives, and nobody else can take it.
    lock = os.open(paths.make_private_dir(paths.cluster_dir(args.name)) / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"A cluster named {args.name!r} is being started or runs already.", file=sys.stderr)
        return EXIT_NAME_TAKEN
    supervisor = Supervisor(
        name=args.name, num_ranks=args.num_ranks, threads=args.threads, backend=args.backend,
        linger_s=args.linger, keep=args.keep, profile=args.profile,
    )
    return asyncio.run(supervisor.serve())


if __name__ == "__main__":
    sys.exit(main())
