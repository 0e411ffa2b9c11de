"""Three kills, and how the job survives each."""

from __future__ import annotations

from bascule.demo.story import Story

__all__ = ["kill_a_rollout_rank", "kill_a_trainer_rank", "kill_the_coordinator"]


def kill_a_rollout_rank(story: Story) -> None:
    """Kill rank 1 of e0 while a version lands on it; then it comes back, with nothing.

    Parameters
    ----------
    story
        Of the play so far.
    """
    narrator, cast = story.narrator, story.cast
    narrator.headline("Kill 1: a rank of e0, while a version lands")
    story.end_step()
    before = story.published.version
    published = story.publish()
    first, victim, last = cast.e0
    victim.tell("die_while_staging")
    first.tell("update", commit_timeout=3.0)
    last.tell("update", commit_timeout=30.0)  # rank 0 decides, when its time is over
    story.begin_e1()
    cast.ask_all(cast.trainers, "save", path=story.checkpoint)  # for the next kill
    story.begin_step()
    victim.reap()
    version = story.published.version
    narrator.then(f"{victim.name} got SIGKILL while version {version} was landing beside {before}.")
    story.require_refusal(first, "NOT_DECIDED")
    story.require_refusal(last, "NOT_DECIDED")
    followed = story.end_e1()
    story.require_e0_unchanged([0, 2])
    narrator.then(
        f"Both hold version {before} still, bit for bit. e1, an engine of its own, went on to "
        f"{version}."
    )
    cast.restart_e0_rank(1)
    narrator.then(f"{victim.name} was started again and joined, with nothing. May e0 serve?")
    first.tell("check_engine_servable")
    story.require_refusal(first, "UNAVAILABLE")
    narrator.then("The three ranks move to the newest version together (EWTT counts all of this):")
    story.show(published, [*story.move_e0(), followed.report])


def kill_a_trainer_rank(story: Story) -> None:
    """Kill trainer 1 when trainer 0 has published already; then the trainer world restarts.

    Parameters
    ----------
    story
        Of the play so far.
    """
    narrator, cast = story.narrator, story.cast
    narrator.headline("Kill 2: a trainer rank, in the middle of a publication")
    story.end_step()
    before = story.published
    survivor, victim = cast.trainers
    survivor.ask("publish", version=before.version + 1)
    victim.kill()
    narrator.then(
        f"{survivor.name} had published its part of version {before.version + 1} when "
        f"{victim.name} got SIGKILL."
    )
    survivor.tell("wait_available", timeout=30.0)
    story.require_refusal(survivor, "ABORTED")
    offered = cast.ask_all(cast.rollouts, "poll")
    story.require(not any(offered), "the engines are offered nothing")
    if not story.prove():
        narrator.then(
            f"The engines are offered nothing and hold version {before.version}, bit for bit."
        )
    cast.restart_trainers(story.checkpoint)
    story.begin_step()
    narrator.then("Both trainers start again, from their checkpoint, and go on:")
    story.update()
    after = story.published
    story.require(after.term > before.term, "the trainers' new life is a new term")
    narrator.then(f"That was term {after.term}, after term {before.term}.")


def kill_the_coordinator(story: Story) -> None:
    """Kill the coordinator and start another one at its address.

    Parameters
    ----------
    story
        Of the play so far.
    """
    narrator, cast = story.narrator, story.cast
    narrator.headline("Kill 3: the coordinator")
    before = story.published
    cast.coordinator.kill()
    narrator.then(
        "The coordinator got SIGKILL. Training and serving need none; news of versions does."
    )
    cast.e1.tell("poll", timeout=2.0)
    story.require_refusal(cast.e1, "UNAVAILABLE")
    cast.start_coordinator()
    narrator.then("Another one was started at the same address; the members rejoin and go on:")
    story.update()
    story.require(story.published.term == before.term, "the term went on")
    narrator.then(f"That was term {story.published.term} still.")
