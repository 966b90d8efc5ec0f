"""The Python API of the notebook side: `Session` (a cluster) and `Run` (one training on it)."""
