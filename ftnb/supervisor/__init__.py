"""The supervisor: one small process per cluster, without torch, that owns the ranks and decides."""
