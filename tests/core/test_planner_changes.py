"""The planner when ranks are replaced, join, leave, and when the supervisor itself dies and another goes on.

Readable cases first, then random stories (see simulated_ranks.py).
"""

from __future__ import annotations

import random

import pytest
from simulated_ranks import World

LONG_RUN = 10**6


def story(seed: int) -> World:
    """A run with any trouble at any moment; afterwards all is well again, or the run has a good reason to end.

    A `calm` story never loses the last rank that is well: its run goes on at the size that is wanted. All other
    stories must only end somehow. Every promise is asserted in `World` meanwhile.
    """
    dice = random.Random(seed)
    calm, endless = dice.random() < 0.6, dice.random() < 0.6
    world = World(
        dice.randint(1, 5), LONG_RUN if endless else dice.randint(1, 30), notices_peers=dice.random() < 0.7,
        has_buffers=dice.random() < 0.5, reports_first=dice.random() < 0.7, refill=dice.random() < 0.7,
        num_spares=dice.choice((0, 0, 1, 2)), seed=seed,
    )  # fmt: skip
    may_raise = True
    kinds = ["die", "die", "pooled", "supervisor", "supervisor", "resize", "pause", "unpause", "raise", "break", "repeat"]
    kinds = dice.sample(kinds, dice.randint(1, len(kinds)))
    if calm and ("resize" in kinds or not world.refill):  # or the only ranks that are well might be those that leave
        kinds = [kind for kind in kinds if kind != "raise"] or ["die"]
    for _ in range(dice.randint(1, 12)):
        world.go_on(dice.choice((5, 20, 60, 200, 500)), dice.randrange(2**32))
        if world.end is not None:
            break
        kind = dice.choice(kinds)
        numbers = [rank.number for rank in world.ranks]
        if kind == "die":
            for number in dice.sample(numbers, dice.randint(1, min(2, len(numbers)))):
                if not calm:
                    world.die(number, dice.choice(("kill", "kill", "exit", "crash")))
                elif world.can_spare(number):
                    world.die(number)
        elif kind == "pooled":
            world.lose_pooled(dice.randrange(8))
        elif kind == "supervisor":
            world.kill_supervisor(dice.choice((None, 0, 1, 2, 3)))
        elif kind == "resize" and not (calm and world.unheard_deaths):
            world.resize(dice.randint(1, 6))
        elif kind in ("pause", "unpause"):
            getattr(world, kind)()
        elif kind == "raise":
            number = dice.choice(numbers)
            if not calm or (may_raise and world.can_spare(number)):
                may_raise = False
                world.raise_in(number, dice.choice(("share", "forward", "update", "evaluate")))
        elif kind == "break":
            world.break_connection(dice.choice(numbers))
            world.tick(dice.choice((0.1, 1.0)))
        elif kind == "repeat":
            world.repeat_all()
    if endless and calm and "could not form" not in str(world.end):
        world.keeps = True
        if not world.refill and world.end is None:
            world.until(lambda: not world.down and not world.unheard_deaths)
            world.resize(world.state.wanted)
        world.settle()
        assert len(world.state.members) == world.state.wanted
    if endless and world.end is None:
        world.until(lambda: not world.down)
        world.stop()
    end = world.drain()
    if calm and "could not form" not in end.reason:
        assert end.state == ("stopped" if endless else "finished"), end
    return world


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_any_story(first):
    for seed in range(first, first + 50):
        try:
            story(seed)
        except AssertionError as error:
            error.add_note(f"story({seed})")
            raise


@pytest.mark.long
def test_many_stories():
    for seed in range(10_000, 16_000):
        story(seed)
