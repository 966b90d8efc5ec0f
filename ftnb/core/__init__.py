"""The pure part of ftnb: decisions and bookkeeping. Standard library only; no sockets, threads or clock."""
