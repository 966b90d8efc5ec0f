"""Called in the engine's main thread through ipyparallel: hands trained weights to the notebook."""

from __future__ import annotations

from typing import Any


def take_weights() -> list[tuple[str, str, list[int], bytes]]:
    """The copy that the training thread laid ready: (name, dtype, shape, bytes) per entry of the state dict."""
    from ftnb.rank import engine

    assert engine.agent is not None
    training: Any = engine.agent.training or engine.agent.last_training
    if training is None or training.weights is None:
        raise RuntimeError("no weights lie ready on this rank")
    return training.weights
