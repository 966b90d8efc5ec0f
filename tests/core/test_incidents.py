"""Findings, injected faults and recoveries, read from events."""

from ftnb.core.incidents import by_kind, failures_of, faults_of, lost_work, summary_of

RUN = {"dataset_len": 22, "options": {"global_batch": 8}}
PHASES = {"detect_s": 0.6, "fence_s": 0.01, "regroup_s": 0.02, "restore_s": 0.0, "first_step_s": 0.02, "mttr_s": 0.65}


class Events(list):
    """Events in order, a tenth of a second apart."""

    def add(self, kind, **fields):
        self.append({"time": 100 + len(self) / 10, "kind": kind, "generation": 1, **fields})
        return self

    def injected(self, fault, rank, step=5):
        return self.add("fault_injected", fault=fault, rank=rank, step=step)

    def lost(self, failure, rank, step=5):
        return self.add("rank_failed", failure=failure, rank=rank, step=step, reason=f"Rank {rank} is gone.")

    def recovered(self, ranks, step=5, lost_steps=1):
        return self.add("recovered", ranks=ranks, step=step, lost_steps=lost_steps, **PHASES)


def test_a_finding_belongs_to_the_fault_of_its_rank():
    events = Events().injected("hang", 2).injected("gil", 1).lost("hang", 2).recovered([2]).lost("gil", 1, 8).recovered([1], 8)
    failures = failures_of(RUN, events)
    assert [(f.kind, f.rank, f.injected, f.mttr_s) for f in failures] == [("hang", 2, "hang", 0.65), ("gil", 1, "gil", 0.65)]
    assert [fault.outcome for fault in faults_of(events)] == ["found after 0.20 s (hang)", "found after 0.30 s (gil)"]


def test_a_death_without_a_fault_came_by_itself():
    events = Events().injected("hang", 2).lost("kill", 1).recovered([1])
    assert [f.injected for f in failures_of(RUN, events)] == [None]
    assert faults_of(events.add("run_finished"))[0].outcome == "the run went on as if nothing had happened"


def test_a_fault_explains_one_death_only():
    events = Events().injected("kill", 2).lost("kill", 2).recovered([2]).lost("kill", 2, 9).recovered([2], 9)
    assert [f.injected for f in failures_of(RUN, events)] == ["kill", None]


def test_a_pause_that_did_no_harm_does_not_explain_a_later_death():
    events = Events().add("fault_injected", fault="hang", rank=2, step=5, duration_s=0.2)
    events += [{"time": 110.0, "kind": "rank_failed", "generation": 1, "rank": 2, "failure": "kill", "reason": "Gone."}]
    assert failures_of(RUN, events)[0].injected is None
    assert faults_of(events.add("run_finished"))[0].outcome == "the run went on as if nothing had happened"


def test_a_slow_rank_that_is_killed_later_was_not_killed_by_its_slowness():
    events = Events().injected("slow", 2).add("straggler_detected", rank=2, reason="slow").lost("kill", 2).recovered([2])
    assert failures_of(RUN, events)[0].injected is None
    assert faults_of(events)[0].outcome == "found after 0.10 s (straggler)"
    evicted = Events().injected("slow", 2).add("straggler_detected", rank=2).lost("straggler", 2).recovered([2])
    assert failures_of(RUN, evicted)[0].injected == "slow"


def test_an_out_of_memory_kill_is_found_as_a_kill():
    events = Events().injected("oom", 3).lost("kill", 3).recovered([3])
    assert [(f.kind, f.injected) for f in failures_of(RUN, events)] == [("kill", "oom")]


def test_what_all_ranks_recover_from_together_is_a_failure_of_no_rank():
    events = Events().injected("nan", 1).add("nan_detected", ranks=[1], step=5, reason="NaN.").add("rolled_back").recovered([], 1, 4)
    (failure,) = failures_of(RUN, events)
    assert (failure.kind, failure.rank, failure.reason, failure.injected, failure.step) == ("nan", None, "NaN.", "nan", 5)
    assert (failure.lost_steps, failure.lost_samples) == (4, 8 + 8 + 6 + 8)
    twin = Events().add("divergence_detected", step=6, reason="They differ.").add("regroup_started", reason="x").recovered([], 5, 2)
    assert failures_of(RUN, twin)[0].kind == "bitflip"
    broken = Events().add("regroup_started", reason="A collective failed.").recovered([], 5)
    assert [(f.kind, f.reason) for f in failures_of(RUN, broken)] == [("connection", "A collective failed.")]


def test_an_earlier_recovery_hides_what_led_to_it():
    events = Events().add("nan_detected", ranks=[1], step=5).recovered([], 1, 4).add("regroup_started", reason="y").recovered([], 7)
    assert [f.kind for f in failures_of(RUN, events)] == ["nan", "connection"]


def test_a_flipped_bit_is_found_by_the_divergence_and_named_with_its_rank():
    events = Events().injected("bitflip", 2).add("divergence_detected", ranks=[2], step=10).lost("bitflip", 2, 10).recovered([2], 6, 5)
    (failure,) = failures_of(RUN, events)
    assert (failure.kind, failure.rank, failure.injected, failure.lost_steps) == ("bitflip", 2, "bitflip", 5)


def test_planned_faults_that_did_not_happen_are_listed_with_their_reason():
    events = Events().add("fault_not_fired", fault="kill", rank=1, step=90, reason="The kill did not\nhappen.")
    (fault,) = faults_of(events)
    assert not fault.fired and fault.outcome == "The kill did not happen."
    assert summary_of([fault]) == "none injected; 1 planned one did not happen"


def test_summaries():
    events = Events().lost("kill", 2).recovered([2]).lost("hang", 1).recovered([1]).lost("kill", 0)
    failures = failures_of(RUN, events)
    assert by_kind(failures) == [("kill", 2, 0.65), ("hang", 1, 0.65)]
    assert lost_work(RUN, events) == (2, 16)


def test_ranks_that_are_lost_together_do_their_step_again_once():
    events = Events().lost("kill", 2).lost("kill", 1).recovered([1, 2])
    assert lost_work(RUN, events) == (1, 8)
