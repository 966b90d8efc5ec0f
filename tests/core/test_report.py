from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.lib.pretty import pretty

from ftnb.core.events import make_event
from ftnb.core.ledger import StepAssembler
from ftnb.core.report import Failure, build_report, useful_seconds
from ftnb.core.sampler import batch_at, digest, permutation, split

DATASET_LEN, GLOBAL_BATCH, SEED = 22, 8, 3  # three steps an epoch: 8, 8 and 6 samples
PHASES = {
    "mttr_s": 0.05,
    "detect_s": 0.003,
    "fence_s": 0.001,
    "regroup_s": 0.02,
    "restore_s": 0.006,
    "first_step_s": 0.02,
    "lost_steps": 1,
}


def train(generations, silent=()):
    """Metrics and ledger of generations [(members, last step)]; `silent`: (step, rank) that never report."""
    assembler = StepAssembler(DATASET_LEN, GLOBAL_BATCH)
    lines, done = [], 0
    for number, (members, last) in enumerate(generations, start=1):
        assembler.open_generation(number, members, done + 1)
        for step in range(done + 1, last + 1):
            batch = batch_at(step, DATASET_LEN, GLOBAL_BATCH)
            order = permutation(DATASET_LEN, SEED, batch.epoch)
            for rank, (start, stop) in zip(
                members, split(batch.start, batch.stop, len(members)), strict=True
            ):
                if (step, rank) not in silent:
                    value = digest(order[start:stop])
                    assembler.fetched(number, step, rank, stop - start, value, 1 / step, stop - start, {})
            for rank in members:
                lines += assembler.committed(number, step, rank, 100.0 + step, 0.1, 1.0, 0.8)
        lines += assembler.close_generation(last)
        done = last
    return [line.metrics for line in lines], [line.ledger for line in lines]


def run_json(steps, state="finished", **changes):
    run = {
        "name": "run",
        "state": state,
        "options": {"global_batch": GLOBAL_BATCH, "seed": SEED},
        "total_steps": steps,
        "dataset_len": DATASET_LEN,
        "num_ranks": 4,
        "started": 100.0,
        "ended": 100.0 + steps,
        "weights_digest": "ab" * 32,
        "weights_digests": {"0": "ab" * 32, "1": "ab" * 32},
        "error": None,
    }
    return run | changes


def failed(rank, step, **fields):
    reason = f"rank {rank} was killed by SIGKILL"
    return make_event("rank_failed", 103.0, 1, rank=rank, step=step, reason=reason, failure="kill", **fields)


def recovered(ranks, step, generation=2):
    return make_event("recovered", 103.1, generation, step=step, ranks=ranks, **PHASES)


def finished():
    return make_event("run_finished", 108.0, 1, reason="All steps are committed.")


def undisturbed(steps=8):
    metrics, ledger = train([((0, 1, 2, 3), steps)])
    return run_json(steps), [finished()], metrics, ledger


def test_a_run_without_failure():
    report = build_report(*undisturbed())
    assert report.ok and report.ledger_ok and report.problems == [] and report.notes == []
    assert (report.name, report.state, report.reason) == ("run", "finished", "All steps are committed.")
    assert (report.steps, report.total_steps, report.generations) == (8, 8, 1)
    assert (report.world_size_start, report.world_size_end) == (4, 4)
    # Two epochs of 22 and two batches of 8: the short last batch is counted as what it is.
    assert (report.samples_expected, report.samples_used) == (60, 60)
    assert (report.samples_missed, report.samples_repeated, report.samples_unverified) == (0, 0, 0)
    assert report.wall_s == 8.0
    assert report.goodput == pytest.approx(0.8)
    assert report.final_loss == 1 / 8
    assert report.failures == []
    assert (report.weights_agree, report.weights_ranks, report.weights_digest) == (True, 2, "ab" * 32)


def test_one_rank_killed():
    metrics, ledger = train([((0, 1, 2, 3), 4), ((0, 1, 3), 8)])
    report = build_report(run_json(8), [failed(2, 5), recovered([2], 5), finished()], metrics, ledger)
    assert report.ok
    assert report.failures == [Failure("kill", 2, 5, "rank 2 was killed by SIGKILL", **PHASES, lost_samples=8)]
    assert (report.lost_steps, report.lost_samples) == (1, 8)
    assert (report.generations, report.world_size_start, report.world_size_end) == (2, 4, 3)


def test_ranks_lost_together_share_the_figures_of_their_recovery():
    metrics, ledger = train([((0, 1, 2, 3), 4), ((3,), 8)])
    events = [failed(0, 5), failed(1, 5), failed(2, 5), recovered([0, 1, 2], 5), finished()]
    report = build_report(run_json(8), events, metrics, ledger)
    assert report.ok
    assert [failure.rank for failure in report.failures] == [0, 1, 2]
    assert {failure.mttr_s for failure in report.failures} == {0.05}


def test_each_failure_gets_its_own_recovery():
    first, second = recovered([2], 3), recovered([1], 6, 3) | {"mttr_s": 0.9}
    report = build_report(run_json(8), [failed(2, 3), first, failed(1, 6), second], *undisturbed()[2:])
    assert [failure.mttr_s for failure in report.failures] == [0.05, 0.9]


def test_a_recovery_of_other_ranks_does_not_count():
    report = build_report(run_json(8), [failed(2, 3), recovered([1], 4)], *undisturbed()[2:])
    assert report.failures[0].mttr_s is None


def test_a_rank_lost_in_the_first_step_counts_at_the_start():
    metrics, ledger = train([((0, 2, 3), 8)])
    report = build_report(run_json(8), [failed(1, 1), recovered([1], 1), finished()], metrics, ledger)
    assert (report.world_size_start, report.world_size_end) == (4, 3)


def test_a_failure_between_two_steps_is_shown_at_the_step_of_its_recovery():
    metrics, ledger = train([((0, 1, 2, 3), 4), ((3,), 8)])
    events = [failed(1, 5), failed(2, None), recovered([1, 2], 5), failed(0, None)]
    report = build_report(run_json(8), events, metrics, ledger)
    assert [failure.step for failure in report.failures] == [5, 5, None]
    assert "None" not in str(report) and "\n  rank 0: rank 0 was killed" in str(report)


def test_a_loss_that_is_not_finite_is_noted():
    run, events, metrics, ledger = undisturbed()
    for step in (3, 4, 8):
        metrics[step - 1]["loss"] = None
    metrics[5] |= {"loss": None, "loss_shares": "0/4"}  # nobody reported it
    report = build_report(run, events, metrics, ledger)
    assert report.ok
    assert report.notes == ["steps 3-4, 8: the loss was not finite (NaN or infinity)"]


def test_a_terminal_shows_the_whole_report():
    report = build_report(*undisturbed())
    assert pretty(report) == str(report)


def test_a_failure_without_recovery_ends_the_run():
    metrics, ledger = train([((0,), 4)])
    events = [failed(0, 5), make_event("run_failed", 104.0, 1, reason="All ranks are lost.")]
    run = run_json(8, "failed", ended=105.0, weights_digest=None, weights_digests=None)
    report = build_report(run, events, metrics, ledger)
    assert report.failures == [Failure("kill", 0, 5, "rank 0 was killed by SIGKILL")]
    assert (report.steps, report.samples_expected, report.samples_used) == (4, 30, 30)
    assert report.problems == ["the run failed: All ranks are lost."]
    assert report.ledger_ok and not report.ok
    assert "no recovery followed" in str(report)


def test_a_missing_step():
    run, events, metrics, ledger = undisturbed()
    del ledger[2]  # the short one: 6 samples
    report = build_report(run, events, metrics, ledger)
    assert report.problems == ["step 3: no line in the ledger"]
    assert (report.samples_expected, report.samples_used, report.samples_missed) == (60, 54, 6)
    assert not report.ok and not report.ledger_ok


def test_missing_last_steps_of_a_finished_run():
    run, events, metrics, ledger = undisturbed()
    report = build_report(run, events, metrics[:-2], ledger[:-3])
    assert report.problems == [
        "step 6: no line in the ledger",
        "the run is marked finished after 6 of 8 steps",
    ]
    assert report.samples_missed == 6


def test_a_missing_metrics_line():
    run, events, metrics, ledger = undisturbed()
    report = build_report(run, events, [line for line in metrics if line["step"] not in (2, 4, 5)], ledger)
    assert report.problems == ["steps 2, 4-5: no line in the metrics"]
    assert report.ledger_ok


def test_lines_of_a_later_generation_replace_earlier_ones():
    metrics, ledger = train([((0, 1, 2, 3), 6)])
    again = [line | {"generation": 2} for line in ledger[3:5]]  # rolled back to 3, then stopped at 5
    again_metrics = [line | {"generation": 2, "loss": 9.0} for line in metrics[3:5]]
    run = run_json(8, "stopped")
    report = build_report(run, [], metrics + again_metrics, ledger + again)
    assert report.ok
    assert (report.steps, report.samples_used, report.samples_expected) == (5, 38, 38)
    assert report.final_loss == 9.0
    assert report.notes == ["3 ledger lines of earlier generations replaced by later ones"]


def test_steps_that_were_undone_do_not_count_if_the_run_ended_before_they_were_done_again():
    metrics, ledger = train([((0, 1, 2, 3), 8)])
    back = make_event("rolled_back", 103.0, 2, reason="All go back.", first_step=5, last_step=8)
    stopped = make_event("run_stopped", 104.0, 2, reason="Stopped.")
    report = build_report(run_json(8, state="stopped"), [back, stopped], metrics, ledger)
    assert (report.steps, report.samples_used, report.problems) == (4, 8 + 8 + 6 + 8, [])


def test_a_step_twice_in_one_generation_is_a_repetition():
    run, events, metrics, ledger = undisturbed()
    report = build_report(run, events, metrics, [*ledger, ledger[0]])
    assert report.problems == ["step 1: more than one line of the same generation"]
    assert (report.samples_repeated, report.samples_missed, report.samples_used) == (8, 0, 68)


def test_a_digest_that_does_not_match():
    run, events, metrics, ledger = undisturbed()
    ledger[5] = ledger[5] | {"digest": "0" * 16}
    report = build_report(run, events, metrics, ledger)
    assert report.problems == ["step 6: the ranks fetched other samples than planned (digest mismatch)"]
    assert (report.samples_missed, report.samples_used, report.samples_repeated) == (6, 54, 0)


def test_shares_that_do_not_add_up():
    run, events, metrics, ledger = undisturbed()
    ledger[0] = ledger[0] | {"shares": {"0": 2, "1": 2, "2": 2, "3": 1}}
    report = build_report(run, events, metrics, ledger)
    assert report.problems == ["step 1: the shares do not add up to the batch"]
    assert report.samples_missed == 8


def test_the_batch_of_another_step():
    run, events, metrics, ledger = undisturbed()
    ledger[1] = ledger[0] | {"step": 2}
    report = build_report(run, events, metrics, ledger)
    assert report.problems == ["step 2: not the samples that belong to the step"]
    assert (report.samples_missed, report.samples_repeated) == (8, 8)


def test_shares_that_a_dead_rank_did_not_report():
    metrics, ledger = train([((0, 1, 2, 3), 3), ((0, 1, 3), 8)], silent={(3, 1)})
    assert (ledger[2]["shares_reported"], ledger[2]["unreported"]) == ("3/4", [1])
    report = build_report(run_json(8), [failed(1, 4)], metrics, ledger)
    assert report.ok
    assert (report.samples_used, report.samples_missed, report.samples_unverified) == (60, 0, 2)
    assert report.notes == [
        "step 3: 2 samples used by ranks that were lost before they reported which; "
        "counted as used, not verified"
    ]
    # What the others reported is checked all the same.
    damaged = [*ledger[:2], ledger[2] | {"digest": "1" * 16}, *ledger[3:]]
    report = build_report(run_json(8), [failed(1, 4)], metrics, damaged)
    assert "digest mismatch" in report.problems[0]
    # A rank that lives reports what it does: else reports have been missed.
    for events in ([], [failed(2, 4)], [failed(1, 4) | {"generation": 2}]):
        report = build_report(run_json(8), events, metrics, ledger)
        assert report.problems == ["step 3: not reported by ranks that were never lost"] and not report.ok


def test_partly_reported_shares_without_names_are_not_verified():
    metrics, ledger = train([((0, 1, 2, 3), 8)], silent={(3, 1)})
    del ledger[2]["unreported"]
    report = build_report(run_json(8), [], metrics, ledger)
    assert report.ok and report.samples_unverified == 6


def test_weights_that_differ_or_are_missing():
    run, events, metrics, ledger = undisturbed()
    run["weights_digests"]["1"] = "cd" * 32
    report = build_report(run, events, metrics, ledger)
    assert report.weights_agree is False and not report.ok
    assert report.problems == [
        "the weights differ between ranks: rank 0 has abababababab, rank 1 has cdcdcdcdcdcd"
    ]

    run |= {"weights_digests": None, "weights_digest": None}
    report = build_report(run, events, metrics, ledger)
    assert report.weights_agree is None and not report.ok
    assert report.problems == ["no rank reported the digest of its weights, so they were not compared"]


def test_a_running_run_is_judged_by_what_is_in_both_files():
    run, _, metrics, ledger = undisturbed()
    run |= {"state": "running", "ended": None, "weights_digest": None, "weights_digests": None}
    report = build_report(run, [], metrics[:5], ledger[:4])
    assert (report.steps, report.problems, report.wall_s) == (4, [], 4.0)
    assert not report.ok
    assert "samples hold, weights not compared yet" in str(report)


@pytest.mark.parametrize("run", [{}, {"name": "a", "state": "failed", "error": {"message": "no model"}}])
def test_a_run_that_never_began(run):
    report = build_report(run, [], [], [])
    assert (report.steps, report.samples_expected, report.goodput) == (0, 0, None)
    assert not report.ok
    assert str(report) and report._repr_html_()
    assert report.reason == run.get("error", {}).get("message", "")


def test_a_run_json_without_the_sizes_is_a_problem_not_a_crash():
    run, events, metrics, ledger = undisturbed()
    report = build_report(run | {"options": {}}, events, metrics, ledger)
    assert "run.json lacks" in report.problems[0] and not report.ledger_ok


def test_text():
    metrics, ledger = train([((0, 1, 2, 3), 4), ((0, 1, 3), 8)])
    report = build_report(run_json(8), [failed(2, 5), recovered([2], 5), finished()], metrics, ledger)
    assert str(report) == TEXT.strip("\n")
    assert repr(report) == "Report(name='run', state='finished', steps=8, failures=1, ok=True)"


TEXT = """
run: finished, 8 of 8 steps in 8.0 s, goodput 80.0 %
  All steps are committed.

  step  rank  failure  detect ms  fence ms  regroup ms  restore ms  first step ms  MTTR ms  steps lost
     5     2     kill        3.0       1.0        20.0         6.0           20.0     50.0           1
  step 5, rank 2: rank 2 was killed by SIGKILL

  ranks       4 at the start, 3 at the end, 2 generations
  final loss  0.125
  lost work   1 step (8 samples) done again
  samples     60 expected, 60 used, 0 repeated, 0 missed
  weights     equal on 2 ranks, sha256 abababababababab
  checks      all hold
"""


class _Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.texts, self.open_tags = [], []

    def handle_starttag(self, tag, attrs):
        self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_well_formed_escaped_and_says_the_same_as_the_text():
    metrics, ledger = train([((0, 1, 2, 3), 4), ((0, 1, 3), 8)], silent={(3, 2)})
    ledger[5] = ledger[5] | {"digest": "0" * 16}
    evil = "<script>alert('x')</script> & \"more\"\nsecond line"
    events = [failed(2, 5) | {"reason": evil}, recovered([2], 5), finished() | {"reason": evil}]
    report = build_report(run_json(8, name="<b>run</b>"), events, metrics, ledger)
    html = report._repr_html_()
    assert "<script" not in html and "<b>run" not in html
    parser = _Texts()
    parser.feed(html)
    assert parser.open_tags == []
    words = " ".join(str(report).split())
    for text in parser.texts:
        said = " ".join(text.removeprefix("problem: ").removeprefix("note: ").split())
        assert said in words
    assert len(report.problems) == len(report.notes) == 1
    assert all(f"{kind}: " in html for kind in ("problem", "note"))


def test_to_dict_is_plain_data():
    metrics, ledger = train([((0, 1, 2, 3), 8)])
    report = build_report(run_json(8), [failed(2, 5), recovered([2], 5)], metrics, ledger)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is True
    assert data["failures"][0] == {"kind": "kill", "rank": 2, "step": 5} | {
        "reason": "rank 2 was killed by SIGKILL",
        **PHASES,
        "rejoined_s": None,
        "lost_samples": 8,
        "injected": None,
    }


def test_when_the_place_of_a_lost_rank_was_taken():
    metrics, ledger = train([((0, 1, 2, 3), 8)])
    lost = [failed(2, 5), recovered([2], 5), failed(1, 6), recovered([1], 6), failed(2, 7), recovered([2], 7)]
    joined = [{"time": lost[0]["time"] + 0.5, "kind": "rank_joined", "generation": 3, "rank": 2, "step": 5},
              {"time": lost[4]["time"] + 2.0, "kind": "rank_joined", "generation": 7, "rank": 2, "step": 7}]
    report = build_report(run_json(8), [*lost[:2], joined[0], *lost[2:], joined[1]], metrics, ledger)
    first, second, third = report.failures
    assert first.rejoined_s == pytest.approx(0.5 + first.detect_s)
    assert second.rejoined_s is None
    assert third.rejoined_s == pytest.approx(2.0 + third.detect_s)
    assert f"Its place was taken after {third.rejoined_s:.2f} s." in str(report)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_any_history_with_deaths_passes_and_any_damage_is_found(lengths, data):
    generations, last = [], 0
    for lost, length in enumerate(lengths):
        last += length
        generations.append((tuple(range(lost, 4)), last))
    silent = data.draw(st.sets(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=4))
    metrics, ledger = train(generations, silent)
    deaths = [failed(rank, 1) | {"generation": number} for rank in range(4) for number in range(1, 1 + len(lengths))]
    report = build_report(run_json(last), [*deaths, finished()], metrics, ledger)
    assert report.ok, report.problems
    assert report.samples_used == report.samples_expected
    if not ledger:
        return
    place = data.draw(st.integers(0, len(ledger) - 1))
    damage = data.draw(st.sampled_from(["lost", "doubled", "digest", "moved"]))
    line = ledger[place]
    if damage == "lost":
        ledger[place : place + 1] = []
    elif damage == "doubled":
        ledger.append(line)
    elif damage == "digest":
        ledger[place] = line | {"digest": f"{int(line['digest'], 16) ^ 1:016x}"}
    else:
        ledger[place] = line | {"start": line["start"] + 1}
    report = build_report(run_json(last), [finished()], metrics, ledger)
    assert not report.ok and not report.ledger_ok
    assert report.samples_missed + report.samples_repeated > 0
    if not report.samples_unverified:
        assert report.samples_used == (
            report.samples_expected + report.samples_repeated - report.samples_missed
        )


def test_the_longest_step_times_of_two_ranks_do_not_count_their_overlap_twice():
    """Each rank begins its next step while another still finishes the last: 3 steps within 2.5 s."""
    lines = [{"time": 1.0, "step_s": 1.0}, {"time": 1.5, "step_s": 0.9}, {"time": 2.5, "step_s": 0.7}]
    assert useful_seconds(lines) == pytest.approx(1.0 + 0.5 + 0.7)  # a failure took 0.3 s before the third
    assert useful_seconds(lines[1:], before=1.0) == pytest.approx(0.5 + 0.7)
