"""`python -m ftnb.supervisor`: started by `Session.start`, detached from the notebook."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from ftnb.supervisor.server import Supervisor


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
    supervisor = Supervisor(
        name=args.name, num_ranks=args.num_ranks, threads=args.threads, backend=args.backend,
        linger_s=args.linger, keep=args.keep, profile=args.profile,
    )
    return asyncio.run(supervisor.serve())


if __name__ == "__main__":
    sys.exit(main())
