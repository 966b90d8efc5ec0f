"""The training thread: imports torch, then loads and trains one run after the other.

The user's cell runs in this same thread, because what torch keeps per thread (default device, grad mode,
number of threads) must hold for cell and training alike. The engine's main thread stays free for %%px.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftnb.rank.agent import Agent


def work(agent: Agent) -> None:
    link = agent.new_link()
    _do_not_preempt()
    try:
        started = time.time()
        import torch
        import torch._dynamo  # the first DDP imports it: seconds under load, better spent now
        import torch.distributed

        import ftnb.rank.loop  # noqa: F401
    except Exception as error:
        link.tell("broken", reason=f"{type(error).__name__}: {error}")
        raise
    # ipyparallel makes the shell when the controller has let this engine in.
    from IPython.core.interactiveshell import InteractiveShell

    while not InteractiveShell.initialized():
        time.sleep(0.02)
    agent.warm = {
        "import_s": time.time() - started, "torch": torch.__version__,
        "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0, "engine_id": _engine_id(),
    }
    link.tell("warm", **agent.warm)
    agent.phase = "idle"
    while True:
        message = agent.next_work()
        try:
            _run(agent, link, message)
        except BaseException as error:  # ftnb's own fault; the supervisor must hear of it
            from ftnb.rank import cell

            link.tell("broken", reason=f"internal error: {cell.describe_error(error)['traceback']}")
        finally:
            agent.phase = "idle"


def _engine_id() -> int | None:
    """The number under which ipyparallel knows this engine."""
    from traitlets.config import Application

    return getattr(Application._instance, "id", None)


def _do_not_preempt() -> None:
    """Schedule this thread, and those it starts (Gloo's, OpenMP's), as batch work (SCHED_BATCH, Linux).

    Gloo's threads wake each other all the time. With more ranks than cores each wake-up preempts a rank that
    computes: without that, 4 ranks on 2 cores trained twice as fast. Heartbeats come from a thread that stays normal.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system, or a container that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run(agent: Agent, link: Any, message: dict[str, Any]) -> None:
    """Load one run's cell, answer whether it can be trained, and train it."""
    import cloudpickle
    import torch
    from IPython import get_ipython
    from IPython.core.interactiveshell import InteractiveShell

    from ftnb.errors import CheckError
    from ftnb.rank import cell, output
    from ftnb.rank.loop import Training

    options = message["options"]
    agent.orders.reset()
    agent.last_training = None
    agent.phase = "loading"
    output.capture(link.log)
    _forget_torch_settings()
    shell = get_ipython() or InteractiveShell.instance()
    namespace = shell.user_ns
    device = torch.device("cuda", message["gpu"]) if message["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(message["threads"])
    try:
        cell.apply_paths(message["cwd"], message["sys_path"])
        names = cloudpickle.loads(message["names"]) if message.get("names") else {}
        cell.run_cell(message["cell"], namespace, names, options["seed"])
        sys.stdout.flush()  # a last line without its end belongs to the cell, not to the training
        job = cell.check(namespace, options, device, message["world_size"])
        signature = cell.signature(job)
        options |= _lengths(job, options)
        training = Training(
            job, options, agent.rank, message["backend"], link, agent.orders, joins=message.get("joins", False)
        )
    except CheckError as error:
        link.tell("loaded", run=message["run"], ok=False, kind="check", error={"evalue": str(error)})
        return
    except BaseException as error:  # whatever a cell raises, sys.exit() included, must not end this thread
        link.tell("loaded", run=message["run"], ok=False, kind="cell", error=cell.describe_error(error))
        return
    agent.training = training
    agent.phase = "training"
    try:
        link.tell(
            "loaded", run=message["run"], ok=True, signature=signature,
            total_steps=training.total_steps, dataset_len=job.dataset_len,
        )
        training.run()
    finally:
        agent.last_training = training
        agent.training = None
        if agent.orders.take_snapshot_wish():  # it came after the last look
            link.tell("weights", **training.take_weights())
        sys.stdout.flush()


def _forget_torch_settings() -> None:
    """What an earlier cell has set for this thread or process must not hold for the next one."""
    import torch

    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def _lengths(job: Any, options: dict[str, Any]) -> dict[str, int]:
    from ftnb.core import sampler

    per_epoch = sampler.steps_per_epoch(job.dataset_len, options["global_batch"])
    steps = options["steps"] if options.get("steps") else options["epochs"] * per_epoch
    return {"total_steps": steps}
