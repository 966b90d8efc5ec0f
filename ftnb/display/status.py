"""The state of a run and of a cluster: text and HTML twins of the same facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ftnb.display.table import COLOURS, Shown, count, html_table, number, seconds, text_table

_BAR_WIDTH = 30
_NUM_RECENT = 5
_RANK_HEADER = ("rank", "state", "step", "engine", "pid", "host", "last heartbeat")


def run_status(info: Mapping[str, Any]) -> Shown:
    return Shown(run_text(info), run_html(info))


def run_text(info: Mapping[str, Any]) -> str:
    done = _share_done(info)
    filled = round(done * _BAR_WIDTH)
    lines = [
        f"Run {info['run']}: {info['state']}",
        f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {_step_text(info)}",
        _join(_facts(info)),
        _join(_clock(info)),
    ]
    if ranks := info.get("ranks"):
        lines += ["", *text_table(_RANK_HEADER, _rank_rows(ranks))]
    if recent := _recent(info):
        lines += ["", *(f"- {reason}" for reason in recent)]
    if error := error_text(info):
        lines += ["", error]
    return "\n".join(line for line in lines if line is not None)


def run_html(info: Mapping[str, Any]) -> str:
    state = str(info["state"])
    colour = COLOURS.get(state, "inherit")
    parts = [
        f"<div><b>Run {escape(str(info['run']))}</b> &middot; "
        f"<b style='color:{colour}'>{escape(state)}</b> &middot; {escape(_step_text(info))}</div>",
        "<div style='background:var(--jp-layout-color2, #ddd);border-radius:3px;height:8px;max-width:480px;"
        f"margin:4px 0'><div style='width:{_share_done(info):.1%};height:8px;border-radius:3px;"
        f"background:{colour}'></div></div>",
        f"<div>{escape(_join(_facts(info)))}</div>",
        f"<div>{escape(_join(_clock(info)))}</div>",
    ]
    if ranks := info.get("ranks"):
        parts.append(html_table(_RANK_HEADER, _rank_rows(ranks), states=1))
    if recent := _recent(info):
        items = "".join(f"<li>{escape(reason)}</li>" for reason in recent)
        parts.append(f"<ul style='margin:4px 0;padding-left:20px'>{items}</ul>")
    if error := error_text(info):
        parts.append(f"<pre style='color:{COLOURS['failed']};margin:4px 0'>{escape(error)}</pre>")
    return f"<div style='font-size:var(--jp-ui-font-size1, 13px)'>{''.join(parts)}</div>"


def error_text(info: Mapping[str, Any]) -> str:
    """The user's own traceback, if that is what ended the run; what it means is said by the run's reason."""
    return str((info.get("error") or {}).get("traceback") or "").rstrip()


def cluster_status(status: Mapping[str, Any], name: str = "default") -> Shown:
    return Shown(cluster_text(status, name), cluster_html(status, name))


def cluster_text(status: Mapping[str, Any], name: str = "default") -> str:
    lines = [f"Cluster {name}: {status['state']}", _join(_cluster_facts(status))]
    lines += text_table(_RANK_HEADER, _rank_rows(status["ranks"])) if status["ranks"] else ["no ranks"]
    if problem := status.get("resize_problem"):
        lines += ["", f"Resizing failed: {problem}"]
    return "\n".join(lines)


def cluster_html(status: Mapping[str, Any], name: str = "default") -> str:
    state = str(status["state"])
    problem = status.get("resize_problem") or ""
    if problem:
        problem = f"<div style='color:{COLOURS['failed']}'>Resizing failed: {escape(str(problem))}</div>"
    return (
        "<div style='font-size:var(--jp-ui-font-size1, 13px)'>"
        f"<div><b>Cluster {escape(name)}</b> &middot; "
        f"<b style='color:{COLOURS.get(state, 'inherit')}'>{escape(state)}</b> &middot; "
        f"{escape(_join(_cluster_facts(status)))}</div>"
        f"{html_table(_RANK_HEADER, _rank_rows(status['ranks']), states=1)}{problem}</div>"
    )


def starting_cluster(status: Mapping[str, Any], name: str) -> Shown:
    """One line while a cluster starts."""
    ready = ready_ranks(status)
    total, elapsed = status["num_ranks"], status["elapsed_s"]
    if ready == total:
        text = f"Cluster {name}: {count(total, 'rank')} ready, after {seconds(elapsed)}."
    else:
        text = f"Starting cluster {name}: {ready} of {count(total, 'rank')} ready ({elapsed:.0f} s)"
    return Shown(text, f"<div>{escape(text)}</div>")


def resizing_cluster(status: Mapping[str, Any], name: str) -> Shown:
    """One line while a cluster gets another number of ranks."""
    present = [entry for entry in status["ranks"] if entry["rank"] is not None]
    working = sum(entry["state"] in ("idle", "training") for entry in present)
    text = (
        f"Resizing cluster {name} to {count(status['num_ranks'], 'rank')}: {len(present)} there, {working} of them "
        f"working ({status['elapsed_s']:.0f} s)"
    )
    return Shown(text, f"<div>{escape(text)}</div>")


def ready_ranks(status: Mapping[str, Any]) -> int:
    """How many ranks have answered; spares do not count."""
    ranks = [entry for entry in status["ranks"] if entry.get("rank", 0) is not None]
    return sum(entry["state"] not in ("starting", "failed") for entry in ranks)


def _step_text(info: Mapping[str, Any]) -> str:
    total = info.get("total_steps")
    return f"step {info.get('step') or 0}" + (f" of {total}" if total else "")


def _share_done(info: Mapping[str, Any]) -> float:
    total = info.get("total_steps") or 0
    return min(1.0, (info.get("step") or 0) / total) if total else 0.0


def _facts(info: Mapping[str, Any]) -> list[str]:
    facts = []
    if info.get("loss") is not None:
        facts.append(f"loss {number(info['loss'])}")
    elif (info.get("step") or 0) > 1:  # in step 1 it may only not be known yet
        facts.append("loss not finite (NaN or infinity)")
    if info.get("epoch") is not None:
        facts.append(f"epoch {info['epoch']}")
    if info.get("world_size") is not None:
        facts.append(f"world size {info['world_size']} of {info.get('num_ranks', '?')}")
    if info.get("generation") is not None:
        facts.append(f"generation {info['generation']}")
    if info.get("global_batch") is not None:
        facts.append(f"global batch {info['global_batch']}")
    if failures := info.get("failures"):
        facts.append(f"{count(failures, 'rank')} lost")
    if chaos := info.get("chaos"):
        facts.append(
            f"chaos every {chaos['mtbf_s']:g} s on average ({chaos['injected']} injected, {chaos['spared']} spared)"
        )
    return facts


def _clock(info: Mapping[str, Any]) -> list[str]:
    clock = []
    if info.get("elapsed_s") is not None:
        clock.append(seconds(info["elapsed_s"]))
    if info.get("steps_per_s"):
        clock.append(f"{number(info['steps_per_s'], 3)} steps/s")
    if info.get("eta_s") is not None and info["state"] in ("running", "recovering"):
        clock.append(f"about {seconds(info['eta_s'])} left")
    if info.get("goodput") is not None:
        clock.append(f"goodput {100 * info['goodput']:.1f} %")
    return clock


def _recent(info: Mapping[str, Any]) -> list[str]:
    recent = [str(reason) for reason in (info.get("recent") or [])[:_NUM_RECENT]]
    reason = info.get("reason")
    return [reason, *recent] if reason and reason not in recent else recent


def _cluster_facts(status: Mapping[str, Any]) -> list[str]:
    spares = sum(entry["rank"] is None for entry in status["ranks"])
    num_ranks = len(status["ranks"]) - spares
    facts = [count(num_ranks, "rank"), f"supervisor pid {status.get('supervisor_pid', '–')}"]
    if spares:
        facts.insert(1, count(spares, "spare"))
    if (wanted := status.get("wanted_ranks")) not in (None, num_ranks):
        facts.insert(1, f"{wanted} wanted")
    if status.get("run"):
        facts += [f"run {status['run']}", f"world size {status['world_size']}"]
        facts.append(f"generation {status['generation']}")
    return facts


def _rank_rows(ranks: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [
        [
            "spare" if entry["rank"] is None else entry["rank"],
            entry["state"],
            entry.get("step"),
            entry.get("engine"),
            entry.get("pid"),
            entry.get("host"),
            _age(entry),
        ]
        for entry in ranks
    ]


def _age(entry: Mapping[str, Any]) -> str:
    age = entry.get("heartbeat_age_s")
    return "–" if age is None or entry["state"] in ("failed", "fenced") else f"{seconds(age)} ago"


def _join(facts: Sequence[str]) -> str:
    return " · ".join(facts)
