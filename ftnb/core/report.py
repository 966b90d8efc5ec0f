"""What happened in a run, what it cost, and whether its promises held: computed from the files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from ftnb.core.audit import audit_samples, silent_steps
from ftnb.core.incidents import (
    PHASES,
    Failure,
    Fault,
    by_kind,
    failures_of,
    faults_of,
    lost_work,
    summary_of,
)
from ftnb.core.words import count, one_line, steps_text

__all__ = ["Failure", "Fault", "Report", "build_report", "useful_seconds"]


@dataclass(repr=False)
class Report:
    name: str
    state: str
    reason: str
    steps: int
    total_steps: int | None
    wall_s: float
    goodput: float | None
    final_loss: float | None
    world_size_start: int | None
    world_size_end: int | None
    generations: int
    failures: list[Failure] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)  # injected, or planned and not fired
    lost_steps: int = 0  # done again after failures
    lost_samples: int = 0  # of these steps
    samples_expected: int = 0
    samples_used: int = 0
    samples_repeated: int = 0
    samples_missed: int = 0
    samples_unverified: int = 0  # used, but by ranks that died before they could report their digest
    weights_digest: str | None = None
    weights_agree: bool | None = None  # None: no rank has reported a digest
    weights_ranks: int = 0
    ledger_ok: bool = True
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every check holds: no problem, every sample used exactly once, equal weights on all ranks.

        The ranks compare their weights at the end of a run; those of a stopped run are not known.
        """
        samples_ok = self.samples_missed == self.samples_repeated == 0
        weights_ok = self.weights_agree is True or (self.state == "stopped" and self.weights_agree is None)
        return not self.problems and samples_ok and weights_ok

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def __repr__(self) -> str:
        return (
            f"Report(name={self.name!r}, state={self.state!r}, steps={self.steps}, "
            f"failures={len(self.failures)}, ok={self.ok})"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython without HTML (a terminal, a plain text viewer) shows the whole report, too."""
        printer.text(str(self))

    def __str__(self) -> str:
        lines = [_title(self)]
        if self.reason:
            lines.append(f"  {one_line(self.reason)}")
        if self.failures:
            lines += ["", *_text_table(_FAILURE_COLUMNS, _failure_rows(self))]
            lines += [f"  {_cause(failure)}" for failure in self.failures]
        if odd := _odd_faults(self):
            lines += ["", *(f"  {line}" for line in odd)]
        lines.append("")
        lines += [f"  {label:<11} {value}" for label, value in _summary_rows(self)]
        lines += [f"  problem     {one_line(problem)}" for problem in self.problems]
        lines += [f"  note        {one_line(note)}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<div><b>{escape(_title(self))}</b></div>"]
        if self.reason:
            parts.append(f"<div>{escape(self.reason)}</div>")
        if self.failures:
            parts.append(_html_table(_FAILURE_COLUMNS, _failure_rows(self)))
            parts += [f'<div style="{_DIM}">{escape(_cause(failure))}</div>' for failure in self.failures]
        parts += [f'<div style="{_DIM}">{escape(line)}</div>' for line in _odd_faults(self)]
        parts.append(_html_table((), _summary_rows(self)))
        parts += [f'<div style="{_BAD}">problem: {escape(problem)}</div>' for problem in self.problems]
        parts += [f'<div style="{_DIM}">note: {escape(note)}</div>' for note in self.notes]
        return f'<div style="{_BOX}">{"".join(parts)}</div>'


def useful_seconds(history: Iterable[Mapping[str, Any]], before: float | None = None) -> float:
    """Time spent in steps that count, from the metrics lines of consecutive steps.

    A step begins on each rank when that rank has committed the one before, so the longest of their times may
    overlap the step before; the time between two commits is the limit, unless a failure lies in between.
    `before`: the commit time of the step before the first line.
    """
    total = 0.0
    for line in history:
        time, step_s = line.get("time"), line.get("step_s") or 0.0
        total += step_s if before is None or time is None else min(step_s, max(0.0, time - before))
        before = time if time is not None else before
    return total


def build_report(
    run: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    ledger: Sequence[Mapping[str, Any]],
) -> Report:
    """The report of a run from run.json and its three line files; also while the run goes on."""
    state = run.get("state") or "unknown"
    history = _final_history(metrics, events)
    ledger_history = _final_history(ledger, events)
    ends = [lines[-1]["step"] if lines else 0 for lines in (history, ledger_history)]
    # While the run goes on, one file may have been read a moment before the other.
    steps = max(ends) if state in ("finished", "stopped", "failed") else min(ends)
    history = [line for line in history if line["step"] <= steps]
    audit = audit_samples(run, [line for line in ledger_history if line["step"] <= steps], steps)
    problems = list(audit.problems)
    if silent := silent_steps(ledger_history, events):
        problems.append(f"{steps_text(silent)}: not reported by ranks that were never lost")
    notes = list(audit.notes)
    notes += _not_replaced(run, events)
    notes += [event["reason"] for event in events if event["kind"] == "straggler_detected" and event.get("reason")]
    if skipped := {event.get("step") for event in events if event["kind"] == "nan_detected" and event.get("skipped")}:
        notes.append(f"{steps_text(skipped)}: NaN or infinity in the gradient; these updates were skipped")
    if successors := sum(event["kind"] == "supervisor_started" for event in events):
        notes.append(f"the supervisor was lost and replaced {'once' if successors == 1 else f'{successors} times'}")
    if len(ledger_history) < len(ledger):
        replaced = count(len(ledger) - len(ledger_history), "ledger line")
        notes.append(f"{replaced} of earlier generations replaced by later ones")

    no_metrics = set(range(1, steps + 1)) - {line["step"] for line in history}
    if no_metrics:
        problems.append(f"{steps_text(no_metrics)}: no line in the metrics")
    if not_finite := {line["step"] for line in history if _loss_not_finite(line)}:
        notes.append(f"{steps_text(not_finite)}: the loss was not finite (NaN or infinity)")
    total_steps = run.get("total_steps")
    if state == "finished" and total_steps is not None and steps != total_steps:
        problems.append(f"the run is marked finished after {steps} of {total_steps} steps")

    reason = _ending(run, events)
    if state == "failed":
        problems.append("the run failed" + (f": {reason}" if reason else ""))

    digests = {str(rank): value for rank, value in (run.get("weights_digests") or {}).items() if value}
    weights_digest = run.get("weights_digest") or next(iter(digests.values()), None)
    different = [rank for rank, value in digests.items() if value != weights_digest]
    if different:
        each = ", ".join(f"rank {rank} has {value[:12]}" for rank, value in digests.items())
        problems.append(f"the weights differ between ranks: {each}")
    elif weights_digest is None and state == "finished":
        problems.append("no rank reported the digest of its weights, so they were not compared")

    times = [line["time"] for line in (*events, *history) if line.get("time") is not None]
    started = run.get("started") or min(times, default=0.0)
    ended = run.get("ended") or max(times, default=started)
    wall_s = max(0.0, ended - started)
    useful_s = useful_seconds(history)
    lost_steps, lost_samples = lost_work(run, events)
    world_sizes = [line["world_size"] for line in history if line.get("world_size") is not None]
    return Report(
        name=run.get("name") or "run",
        state=state,
        reason=reason,
        steps=steps,
        total_steps=total_steps,
        wall_s=wall_s,
        goodput=min(1.0, useful_s / wall_s) if wall_s > 0 else None,
        final_loss=history[-1].get("loss") if history else None,
        # The first metrics line is no witness: a rank may have been lost in step 1 already.
        world_size_start=run.get("num_ranks") or (world_sizes[0] if world_sizes else None),
        world_size_end=world_sizes[-1] if world_sizes else run.get("num_ranks"),
        generations=max((line.get("generation") or 0 for line in (*events, *metrics)), default=0),
        failures=failures_of(run, events),
        faults=faults_of(events),
        lost_steps=lost_steps,
        lost_samples=lost_samples,
        samples_expected=audit.expected,
        samples_used=audit.used,
        samples_repeated=audit.repeated,
        samples_missed=audit.missed,
        samples_unverified=audit.unverified,
        weights_digest=weights_digest,
        weights_agree=None if weights_digest is None else not different,
        weights_ranks=len(digests),
        ledger_ok=not audit.problems,
        problems=problems,
        notes=notes,
    )


def _loss_not_finite(line: Mapping[str, Any]) -> bool:
    """JSON has no NaN: the loss is null although ranks have reported theirs ("3/4": three of four)."""
    return "loss" in line and line["loss"] is None and not str(line.get("loss_shares")).startswith("0/")


def _final_history(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that count, by step: a generation replaces all that earlier ones wrote from its start on.

    Where all went back, the steps that were undone do not count even if none of them was done again.
    """
    undone = [(event["generation"], event["first_step"]) for event in events if event["kind"] == "rolled_back"]
    lines = [line for line in lines if not any(line["generation"] < g and line["step"] >= s for g, s in undone)]
    first_step: dict[int, int] = {}
    for line in lines:
        generation = line["generation"]
        first_step[generation] = min(line["step"], first_step.get(generation, line["step"]))
    end_step: dict[int, float] = {}
    end = float("inf")
    for generation in sorted(first_step, reverse=True):
        end_step[generation] = end
        end = min(end, first_step[generation])
    return sorted(
        (line for line in lines if line["step"] < end_step[line["generation"]]), key=lambda line: line["step"]
    )


def _not_replaced(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a run that replaces lost ranks ended with fewer."""
    if (run.get("options") or {}).get("recovery") != "replace" or run.get("state") not in ("finished", "stopped"):
        return []
    missing = set()
    for event in events:
        if event["kind"] == "rank_failed":
            missing.add(event.get("rank"))
        elif event["kind"] == "rank_joined":
            missing.discard(event.get("rank"))
    refused = [event["reason"] for event in events if event["kind"] == "spare_lost" and "any more" in event["reason"]]
    if not missing or None in missing:
        return []
    ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
    return [refused[-1] if refused else f"the run ended before {ranks} had been replaced"]


def _ending(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    for event in reversed(events):
        if event["kind"] in ("run_finished", "run_stopped", "run_failed"):
            return event.get("reason") or ""
    return (run.get("error") or {}).get("message") or ""


# Words and tables, shared by the text and its HTML twin

_FAILURE_COLUMNS = (
    "step", "rank", "failure",
    "detect ms", "fence ms", "regroup ms", "restore ms", "first step ms", "MTTR ms", "steps lost",
)  # fmt: skip
_BOX = "color: var(--jp-content-font-color1, inherit); font-size: 13px; line-height: 1.5"
_DIM = "color: var(--jp-content-font-color2, inherit); opacity: 0.85"
_BAD = "color: var(--jp-error-color1, #d32f2f)"
_LINE = "border-bottom: 1px solid var(--jp-border-color2, #8888)"
_CELL = "padding: 1px 10px 1px 0; text-align: {align}; background: transparent; color: inherit"


def _title(report: Report) -> str:
    total = report.steps if report.total_steps is None else report.total_steps
    goodput = "" if report.goodput is None else f", goodput {100 * report.goodput:.1f} %"
    return f"{report.name}: {report.state}, {report.steps} of {total} steps in {report.wall_s:.1f} s{goodput}"


def _failure_rows(report: Report) -> list[list[str]]:
    rows = []
    for failure in report.failures:
        phases_s = [getattr(failure, name) for name in PHASES]
        times = ["-" if phase_s is None else f"{1000 * phase_s:.1f}" for phase_s in phases_s]
        others = [failure.step, failure.rank, failure.kind, failure.lost_steps]
        step, rank, kind, lost_steps = ("-" if value is None else str(value) for value in others)
        rows.append([step, rank, kind, *times, lost_steps])
    return rows


def _cause(failure: Failure) -> str:
    ending = "" if failure.mttr_s is not None else " (no recovery followed)"
    where = "" if failure.step is None else f"step {failure.step}, "
    back = "" if failure.rejoined_s is None else f" Its place was taken after {failure.rejoined_s:.2f} s."
    who = "all ranks" if failure.rank is None else f"rank {failure.rank}"
    injected = f" (injected: {failure.injected})" if failure.injected else ""
    return f"{where}{who}: {one_line(failure.reason) or failure.kind}{injected}{ending}{back}"


def _odd_faults(report: Report) -> list[str]:
    """Injected faults that cost no rank, and planned ones that did not happen: nobody would miss them otherwise."""
    lines = []
    for fault in report.faults:
        if fault.fired and fault.outcome.startswith("found"):
            continue
        step = "" if fault.step is None else f" in step {fault.step}"
        who = "" if fault.rank is None else f" on rank {fault.rank}"
        lines.append(f"injected {fault.kind}{who}{step}: {fault.outcome}" if fault.fired else fault.outcome)
    return lines


def _summary_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    if report.world_size_start is not None:
        sizes = f"{report.world_size_start} at the start, {report.world_size_end} at the end"
        rows.append(("ranks", f"{sizes}, {count(report.generations, 'generation')}"))
    if report.final_loss is not None:
        rows.append(("final loss", f"{report.final_loss:.6g}"))
    kinds = by_kind(report.failures)
    if len(report.failures) > 1:
        words = (f"{n} × {kind}" + ("" if s is None else f" (median {s:.3f} s)") for kind, n, s in kinds)
        rows.append(("failures", ", ".join(words)))
    if len(report.faults) > 1:
        rows.append(("faults", summary_of(report.faults)))
    if report.failures:
        rows.append(
            ("lost work", f"{count(report.lost_steps, 'step')} ({count(report.lost_samples, 'sample')}) done again")
        )
    samples = (
        f"{report.samples_expected} expected, {report.samples_used} used, "
        f"{report.samples_repeated} repeated, {report.samples_missed} missed"
    )
    if report.samples_unverified:
        samples += f", {report.samples_unverified} unverified"
    rows.append(("samples", samples))
    if report.weights_digest is None:
        rows.append(("weights", "not compared"))
    else:
        verdict = "equal" if report.weights_agree else "NOT equal"
        ranks = f" on {count(report.weights_ranks, 'rank')}" if report.weights_ranks else ""
        rows.append(("weights", f"{verdict}{ranks}, sha256 {report.weights_digest[:16]}"))
    if report.problems:
        checks = f"{count(len(report.problems), 'problem')}, see below"
    else:
        checks = "all hold" if report.ok else "samples hold, weights not compared yet"
    rows.append(("checks", checks))
    return rows


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]


def _html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cell = f'style="{_CELL.format(align="right" if header else "left")}"'
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in header)
    head = f'<tr style="{_LINE}">{head}</tr>' if header else ""
    body = "".join(
        "<tr>" + "".join(f"<td {cell}>{escape(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f'<table style="border-collapse: collapse; margin: 6px 0">{head}{body}</table>'
