"""Senders and receivers in one process: values, states, errors, hooks, audits."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import bascule
from bascule.layout import Block, DType, LayoutBuilder, LogicalTensor, Mesh, fused_qkv, shard

SHAPES = {"q": (8, 16), "k": (4, 16), "v": (4, 16), "norm": (16,)}


def rounded(array: Any) -> Any:
    """Bits of fp32 rounded to bf16, to nearest even: an independent reference of the cast."""
    word = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


class World:
    """Two trainer ranks in fp32, rows cut, publishing bf16.

    And an engine of two ranks in bf16, tensor parallel with fused QKV.
    """

    def __init__(self, stack: ExitStack, shadow: Any) -> None:
        self.rng = np.random.default_rng(7)
        self.weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.job = bascule.Job(name=f"test-{uuid.uuid4().hex[:8]}", token="secret")
        self.parts = [
            {name: np.zeros_like(np.split(w, 2)[rank]) for name, w in self.weights.items()}
            for rank in range(2)
        ]
        self.fused = [np.zeros((8, 16), np.uint16) for _ in range(2)]
        self.norms = [np.zeros(16, np.uint16) for _ in range(2)]
        self.senders: list[bascule.WeightSender] = []
        for rank in range(2):
            sender = bascule.WeightSender.connect(
                self.job, rank=rank, world_size=2, layout=self.trainer_layout(rank)
            )
            self.senders.append(stack.enter_context(sender))
            self.job = dataclasses.replace(self.job, coordinator=self.senders[0].coordinator)
        self.receivers = self.on_both(
            lambda rank: stack.enter_context(
                bascule.WeightReceiver.connect(
                    self.job,
                    engine="e0",
                    rank=rank,
                    world_size=2,
                    shadow=shadow,
                    layout=self.engine_layout(rank),
                )
            )
        )

    def trainer_layout(self, rank: int) -> bascule.Layout:
        builder = LayoutBuilder(Mesh(["fsdp"], [2]), [rank])
        for name, part in self.parts[rank].items():
            tensor = LogicalTensor(name, list(SHAPES[name]), DType.BF16)
            builder.add(Block.of(tensor, {"fsdp": shard(0)}), part, name=name)
        return builder.build()

    def engine_layout(self, rank: int) -> bascule.Layout:
        q, k, v, norm = (LogicalTensor(n, list(s), DType.BF16) for n, s in SHAPES.items())
        builder = LayoutBuilder(Mesh(["tp"], [2]), [rank])
        builder.add(fused_qkv(q, k, v, 2, "tp"), self.fused[rank], name="qkv", dtype="bf16")
        builder.add(Block.of(norm), self.norms[rank], name="norm", dtype="bf16")
        return builder.build()

    @staticmethod
    def on_both(call: Any) -> list[Any]:
        """Run ``call(rank)`` on two threads, as the ranks of an engine would."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, range(2)))

    def train(self) -> None:
        for name, weight in self.weights.items():
            weight[:] = self.rng.normal(size=weight.shape)
            for rank in range(2):
                self.parts[rank][name][:] = np.split(weight, 2)[rank]

    def publish(self, version: int) -> list[bascule.Publication]:
        publications = self.on_both(lambda rank: self.senders[rank].publish(version))
        for publication in publications:
            publication.wait()
        return publications

    def stage(self) -> list[bascule.Update]:
        updates = self.on_both(lambda rank: self.receivers[rank].poll())
        assert all(updates)

        def stage(rank: int) -> bool:
            updates[rank].stage()
            updates[rank].wait_staged()
            end = time.monotonic() + 30
            while not (ready := updates[rank].ready()) and time.monotonic() < end:
                time.sleep(0.01)
            return bool(ready)

        assert self.on_both(stage) == [True, True]
        return updates

    def update(self, version: int) -> list[bascule.Update]:
        self.train()
        self.publish(version)
        updates = self.stage()
        self.on_both(lambda rank: updates[rank].commit())
        return updates

    def expect_weights(self) -> None:
        for rank in range(2):
            q, k, v = (np.split(rounded(self.weights[n]), 2)[rank] for n in ("q", "k", "v"))
            np.testing.assert_array_equal(self.fused[rank], np.concatenate([q, k, v]))
            np.testing.assert_array_equal(self.norms[rank], rounded(self.weights["norm"]))


@pytest.fixture(params=["auto", "none"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, request.param)


@pytest.fixture
def shadowed() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, "auto")


def test_updates_arrive_whole_and_rounded(world: World) -> None:
    assert [r.serving for r in world.receivers] == [None, None]
    assert not any(r.servable for r in world.receivers)
    with pytest.raises(bascule.Error):
        world.receivers[0].check_servable()
    assert world.on_both(lambda rank: world.receivers[rank].poll()) == [None, None]
    for version in (1, 2, 5):
        updates = world.update(version)
        world.expect_weights()
        expected = bascule.VersionId(world.senders[0].term, version)
        assert [r.serving for r in world.receivers] == [expected] * 2
        assert [u.id for u in updates] == [expected] * 2
        assert all(r.servable for r in world.receivers)
        assert all(r.state is bascule.ReceiverState.IDLE for r in world.receivers)
        assert world.receivers[0].engine_servable()
        assert world.on_both(lambda rank: world.receivers[rank].poll()) == [None, None]


def test_reports(shadowed: World) -> None:
    shadowed.train()
    publication = shadowed.publish(1)[0]
    assert publication.state() is bascule.PublicationState.AVAILABLE
    sent = publication.report()
    assert sent.id == publication.id
    assert sent.phases.publish > 0
    assert sent.publish_start_ns > 1e18
    updates = shadowed.stage()
    shadowed.on_both(lambda rank: updates[rank].commit())
    report = updates[0].report()
    assert report.bytes == 2 * (8 * 16 + 16)
    assert {link.peer for link in report.links} <= {"trainer 0", "trainer 1", "engine e0 rank 1"}
    assert sum(link.bytes for link in report.links) == report.bytes
    assert report.audited
    assert 0 < report.ewtt < 60
    assert report.commit_end_ns > sent.publish_start_ns
    assert json.loads(json.dumps(report.as_dict()))["phases"]["stage"] > 0
    assert "ewtt" in repr(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.bytes = 0  # type: ignore[misc]


def test_steps_apart_with_an_explicit_version(shadowed: World) -> None:
    shadowed.train()
    term, version = shadowed.publish(3)[0].id
    updates = [r.open(term, version) for r in shadowed.receivers]
    for update in updates:
        update.stage()
    for update in updates:
        update.wait_staged()
    assert shadowed.receivers[0].state is bascule.ReceiverState.VERIFIED
    shadowed.on_both(lambda rank: updates[rank].decide())
    shadowed.on_both(lambda rank: updates[rank].commit())
    shadowed.expect_weights()


def test_an_aborted_update_changes_nothing(shadowed: World) -> None:
    shadowed.update(1)
    before = [array.copy() for array in shadowed.fused]
    shadowed.train()
    shadowed.publish(2)
    updates = shadowed.stage()
    updates[0].abort()
    with pytest.raises(bascule.Error):
        updates[1].commit(timeout=3)
    for rank in range(2):
        np.testing.assert_array_equal(shadowed.fused[rank], before[rank])
        assert shadowed.receivers[rank].serving == (shadowed.senders[0].term, 1)


def test_hook_runs_before_commit_returns(shadowed: World) -> None:
    seen: list[Any] = []
    for rank, receiver in enumerate(shadowed.receivers):
        receiver.set_post_commit_hook(
            lambda done, rank=rank: seen.append((rank, done, threading.get_ident()))
        )
    updates = shadowed.update(1)
    assert sorted(entry[:2] for entry in seen) == [(0, updates[0].id), (1, updates[0].id)]
    for receiver in shadowed.receivers:
        receiver.set_post_commit_hook(None)
    shadowed.update(2)
    assert len(seen) == 2


def test_a_hook_that_raises_poisons_until_the_next_commit(shadowed: World) -> None:
    def hook(done: bascule.VersionId) -> None:
        raise RuntimeError(f"no cache for {done.version}")

    shadowed.receivers[1].set_post_commit_hook(hook)
    shadowed.train()
    shadowed.publish(1)
    updates = shadowed.stage()

    def commit(rank: int) -> BaseException | None:
        try:
            updates[rank].commit()
        except bascule.Error as error:
            return error
        return None

    none, error = shadowed.on_both(commit)
    assert none is None
    assert isinstance(error, bascule.Poisoned)
    assert isinstance(error.__cause__, RuntimeError)
    assert "no cache for 1" in error.message
    with pytest.raises(bascule.Poisoned, match="no cache for 1") as caught:
        shadowed.receivers[1].check_servable()
    for told in (error, caught.value):
        assert "[" not in told.message  # of the fields, which are printed behind it
        assert str(told).count("[rank 1]") == 1
    assert shadowed.receivers[1].state is bascule.ReceiverState.POISONED
    assert shadowed.receivers[1].serving is None
    assert not shadowed.receivers[1].servable
    shadowed.receivers[1].set_post_commit_hook(None)
    shadowed.update(2)
    shadowed.expect_weights()
    assert shadowed.receivers[1].servable


class NoReprError(Exception):
    def __repr__(self) -> str:
        raise ValueError


class NoTextError(Exception):
    def __repr__(self) -> str:
        return "half \ud800"


@pytest.mark.parametrize(
    ("raised", "text"),
    [(NoReprError(), "NoReprError, whose repr() raises"), (NoTextError(), r"raised half \ud800")],
)
def test_a_hook_may_raise_what_has_no_text(raised: Exception, text: str) -> None:
    def hook(done: bascule.VersionId) -> None:
        raise raised

    def layout() -> bascule.Layout:
        return bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})

    job = bascule.Job(name="text")
    with bascule.WeightSender.connect(job, layout=layout()) as sender:
        job = dataclasses.replace(job, coordinator=sender.coordinator)
        with bascule.WeightReceiver.connect(job, engine="e", layout=layout()) as receiver:
            receiver.set_post_commit_hook(hook)
            sender.publish(1).wait()
            update = receiver.poll()
            assert update is not None
            update.stage()
            with pytest.raises(bascule.Poisoned) as caught:
                update.commit()
            assert text in caught.value.message
            assert caught.value.__cause__ is raised
            assert receiver.state is bascule.ReceiverState.POISONED


def test_audit_on_demand_names_the_tensor(shadowed: World) -> None:
    shadowed.update(1)
    shadowed.receivers[0].audit()
    shadowed.fused[0][5, 3] ^= 1  # a row of k: q has 4 rows, then k has 2
    with pytest.raises(bascule.DataLoss) as caught:
        shadowed.receivers[0].audit()
    assert caught.value.tensor == "k"
    shadowed.fused[0][5, 3] ^= 1
    shadowed.receivers[0].audit()


def test_audit_on_demand_names_the_buffer_whose_padding_was_written() -> None:
    memory = {name: np.zeros((4, 8), np.float32) for name in ("a", "b")}
    job = bascule.Job(name="padding")
    layout = bascule.Layout.from_arrays({name: np.ones((4, 5), np.float32) for name in memory})
    with bascule.WeightSender.connect(job, layout=layout) as sender:
        job = dataclasses.replace(job, coordinator=sender.coordinator)
        layout = bascule.Layout.from_arrays({name: array[:, :5] for name, array in memory.items()})
        with bascule.WeightReceiver.connect(job, engine="e", layout=layout) as receiver:
            sender.publish(1).wait()
            update = receiver.poll()
            assert update is not None
            update.stage()
            update.wait_staged()
            update.commit()
            receiver.audit()
            memory["b"][2, 6] = 1
            with pytest.raises(bascule.DataLoss, match=r"bytes of buffer 'b'.* update the layout"):
                receiver.audit()
            receiver.update_layout(layout)


def test_update_layout(shadowed: World) -> None:
    shadowed.update(1)
    old = weakref.ref(shadowed.fused[0])
    shadowed.fused = [np.zeros((8, 16), np.uint16) for _ in range(2)]
    shadowed.on_both(
        lambda rank: shadowed.receivers[rank].update_layout(shadowed.engine_layout(rank))
    )
    gc.collect()
    assert old() is None
    shadowed.update(2)
    shadowed.expect_weights()
    shadowed.parts = [
        {name: part.copy() for name, part in parts.items()} for parts in shadowed.parts
    ]
    shadowed.on_both(
        lambda rank: shadowed.senders[rank].update_layout(shadowed.trainer_layout(rank))
    )
    shadowed.update(3)
    shadowed.expect_weights()


def test_bad_input(shadowed: World) -> None:
    shadowed.update(2)
    with pytest.raises(bascule.InvalidArgument, match="2"):
        shadowed.senders[0].publish(2)
    with pytest.raises(bascule.InvalidArgument):
        shadowed.senders[0].publish(1, timeout=float("nan"))
    with pytest.raises(bascule.PermissionDenied):
        bascule.WeightReceiver.connect(
            dataclasses.replace(shadowed.job, token="other"),
            engine="e1",
            layout=bascule.Layout.from_arrays({"norm": np.zeros(16, np.float32)}),
        )
    with pytest.raises(bascule.NotFound, match="nowhere") as caught:
        bascule.WeightReceiver.connect(
            shadowed.job,
            engine="e1",
            layout=bascule.Layout.from_arrays({"nowhere": np.zeros(16, np.float32)}, unused=["*"]),
        )
    assert caught.value.tensor == "nowhere"
    for version in (-1, 0, 2**64):
        with pytest.raises(bascule.InvalidArgument, match="1 to 18446744073709551615"):
            shadowed.senders[0].publish(version)
        with pytest.raises(bascule.InvalidArgument, match="1 to 18446744073709551615"):
            shadowed.receivers[0].open(1, version)
    with pytest.raises(TypeError):
        shadowed.senders[0].publish("3")  # type: ignore[arg-type]
    frozen = np.zeros(16, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(bascule.InvalidArgument, match="read-only"):
        bascule.WeightReceiver.connect(
            shadowed.job, engine="e1", layout=bascule.Layout.from_arrays({"norm": frozen})
        )


def test_an_engine_ties_only_what_the_trainers_tie() -> None:
    weights = np.arange(4, dtype=np.float32)
    memory = np.zeros(4, np.float32)
    ties: dict[str, Any] = {
        "alias": {"arrays": {"embed": memory}, "aliases": {"lm_head": "embed"}},
        "memory": {"arrays": {"embed": memory, "lm_head": memory}},
    }

    def connect(job: bascule.Job, **tied: Any) -> bascule.WeightReceiver:
        layout = bascule.Layout.from_arrays(**tied)
        return bascule.WeightReceiver.connect(job, engine="e", layout=layout)

    def job_of(sender: bascule.WeightSender) -> bascule.Job:
        return bascule.Job(name="ties", coordinator=sender.coordinator)

    apart = bascule.Layout.from_arrays({"embed": weights, "lm_head": weights + 1})
    with bascule.WeightSender.connect(bascule.Job(name="ties"), layout=apart) as sender:
        for tied in ties.values():
            with pytest.raises(
                bascule.InvalidArgument,
                match="ties lm_head to embed, but the trainers hold them apart",
            ) as caught:
                connect(job_of(sender), **tied)
            assert caught.value.tensor == "lm_head"
    for aliases in ({"lm_head": "embed"}, {}):
        layout = bascule.Layout.from_arrays({"embed": weights}, aliases=aliases)
        with bascule.WeightSender.connect(bascule.Job(name="ties"), layout=layout) as sender:
            for tied in ties.values():
                connect(job_of(sender), **tied).close()


def test_an_alias_needs_its_target() -> None:
    lost = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)}, aliases={"lm_head": "nope"})
    for connect in (
        bascule.WeightSender.connect,
        functools.partial(bascule.WeightReceiver.connect, engine="e"),
    ):
        with pytest.raises(bascule.InvalidArgument, match="alias of 'nope'") as caught:
            connect(bascule.Job(name="lost"), layout=lost)
        assert caught.value.tensor == "lm_head"


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"arena": "bogus"}, "'auto', 'device', 'host', 'direct'"),
        ({"shadow": "bogus"}, "'auto', 'device', 'host', 'none'"),
        ({"rank": -1}, "0 to"),
        ({"world_size": 0}, "1 to"),
        ({"world_size": 2**32}, "to 4294967295"),
        ({"threads": -1}, "1 to"),
        ({"versions_held": 2**32}, "1 to"),
    ],
)
def test_options_say_what_is_allowed(option: dict[str, Any], allowed: str) -> None:
    job = bascule.Job(name="options")
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    name, value = next(iter(option.items()))
    connect: Any = bascule.WeightSender.connect
    if name == "shadow":
        connect = functools.partial(bascule.WeightReceiver.connect, engine="e")
    with pytest.raises(bascule.InvalidArgument, match=allowed) as caught:
        connect(job, layout=layout, **option)
    assert f"{name}={value!r}" in caught.value.message


def test_a_second_rank_of_one_number_is_refused(shadowed: World) -> None:
    with pytest.raises(bascule.AlreadyExists):
        bascule.WeightReceiver.connect(
            shadowed.job,
            engine="e0",
            rank=1,
            world_size=2,
            layout=shadowed.engine_layout(1),
            timeout=1,
        )


def test_closed_objects_say_so(shadowed: World) -> None:
    shadowed.update(1)
    publication = shadowed.publish(2)[0]
    update = shadowed.stage()[0]
    for session in (*shadowed.senders, *shadowed.receivers):
        session.close()
        session.close()
    with pytest.raises(bascule.Closed):
        shadowed.senders[0].publish(3)
    with pytest.raises(bascule.Closed):
        publication.wait()
    with pytest.raises(bascule.Closed):
        shadowed.receivers[0].poll()
    with pytest.raises(bascule.Closed):
        update.commit()


def test_nobody_there() -> None:
    job = bascule.Job(name="nobody", coordinator="127.0.0.1:1")
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    begin = time.monotonic()
    with pytest.raises((bascule.DeadlineExceeded, bascule.Unavailable)):
        bascule.WeightSender.connect(job, layout=layout, timeout=0.5)
    assert time.monotonic() - begin < 3


def test_status_as_asked_from_outside(shadowed: World) -> None:
    shadowed.update(3)
    with pytest.raises(bascule.InvalidArgument):
        shadowed.senders[1].publish(3)
    address = shadowed.job.coordinator
    end = time.monotonic() + 10
    while True:  # reports travel with heartbeats
        status = bascule.coordinator_status(address, "secret")
        members = {(m["role"], m["rank"]): m for m in status["members"]}
        seen = all(m["done"] == 1 for m in members.values())
        if (seen and members["trainer", 1]["error"]) or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert len(members) == 4
    for (role, rank), member in members.items():
        assert member["last"]["version"] == 3
        assert member["last"]["took_ms"] > 0
        assert member["last"]["stall_ms"] > 0
        if role == "rollout":
            assert member["last"]["bytes"] == 2 * (8 * 16 + 16)
            assert member["serving"]["version"] == 3
        assert (member["error"] is not None) == (role == "trainer" and rank == 1)
    assert "version 3" in members["trainer", 1]["error"]["message"]
    with pytest.raises(bascule.PermissionDenied):
        bascule.coordinator_status(address, "guess")
    with pytest.raises(bascule.Unavailable):
        bascule.coordinator_status("127.0.0.1:1", timeout=0.3)


def test_coordinator_apart() -> None:
    with bascule.CoordinatorServer.start(bascule.Job(name="apart", token="t")) as server:
        job = bascule.Job(name="apart", coordinator=server.address, token="t")
        source = np.arange(8, dtype=np.float32)
        target = np.zeros(8, np.float32)
        layout = bascule.Layout.from_arrays({"w": source})
        with (
            bascule.WeightSender.connect(job, layout=layout) as sender,
            bascule.WeightReceiver.connect(
                job, engine="e", layout=bascule.Layout.from_arrays({"w": target})
            ) as receiver,
        ):
            assert sender.coordinator == server.address
            sender.publish(1).wait()
            update = receiver.poll()
            assert update is not None
            update.stage()
            update.wait_staged()
            assert update.ready()
            update.commit()
            np.testing.assert_array_equal(target, source)
            assert json.dumps(server.status())


def test_a_receiver_with_a_hook_to_itself_is_collected() -> None:
    class Engine:
        def __init__(self, job: bascule.Job) -> None:
            layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
            self.receiver = bascule.WeightReceiver.connect(job, engine="e", layout=layout)
            self.receiver.set_post_commit_hook(self.committed)

        def committed(self, done: bascule.VersionId) -> None:
            raise AssertionError(done)

    with bascule.CoordinatorServer.start(bascule.Job(name="gc")) as server:
        engine = Engine(bascule.Job(name="gc", coordinator=server.address))
        gone = weakref.ref(engine), weakref.ref(engine.receiver)
        del engine
        gc.collect()
        assert [reference() for reference in gone] == [None, None]


def test_arrays_live_as_long_as_the_session() -> None:
    array = np.zeros(4, np.float32)
    gone = weakref.ref(array)
    job = bascule.Job(name="owners")
    sender = bascule.WeightSender.connect(job, layout=bascule.Layout.from_arrays({"w": array}))
    del array
    gc.collect()
    assert gone() is not None
    sender.publish(1)
    sender.close()
    del sender
    gc.collect()
    assert gone() is None


def test_a_torch_storage_that_is_gone_is_not_touched() -> None:
    torch = pytest.importorskip("torch")
    trainer = {"a": torch.arange(4.0), "w": torch.arange(1 << 20, dtype=torch.float32)}
    engine = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}

    def free(state: dict[str, Any]) -> Any:
        state["w"].untyped_storage().resize_(0)  # what FSDP1 does to gathered parameters
        return pytest.raises(bascule.InvalidArgument, match=r"call update_layout.* \[tensor w\]")

    def renew(session: Any, state: dict[str, Any]) -> None:
        state["w"] = torch.full((1 << 20,), 7.0)
        session.update_layout(bascule.Layout.from_arrays(state))

    with ExitStack() as stack:
        job = bascule.Job(name="storage")
        layout = bascule.Layout.from_arrays(trainer)
        sender = stack.enter_context(bascule.WeightSender.connect(job, layout=layout))
        job = dataclasses.replace(job, coordinator=sender.coordinator)
        layout = bascule.Layout.from_arrays(engine)
        receiver = stack.enter_context(
            bascule.WeightReceiver.connect(job, engine="e", layout=layout)
        )
        with free(trainer):
            sender.publish(1)
        renew(sender, trainer)
        sender.publish(1).wait()
        update = receiver.poll()
        assert update is not None
        with free(engine):
            update.stage()
        renew(receiver, engine)
        update.stage()
        update.wait_staged()
        with free(engine):
            update.commit()
        update.abort()
        renew(receiver, engine)
        update = receiver.poll()
        assert update is not None
        update.stage()
        update.wait_staged()
        update.commit()
        assert torch.equal(engine["w"], trainer["w"])
        with free(engine):
            receiver.audit()


def test_torch_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    from bascule.integrations.torch import layout_of

    torch.manual_seed(0)
    trainer, engine = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3).to(torch.bfloat16)
    job = bascule.Job(name="torch")
    with bascule.WeightSender.connect(
        job, layout=layout_of(trainer, publish_dtype="bf16")
    ) as sender:
        job = dataclasses.replace(job, coordinator=sender.coordinator)
        with bascule.WeightReceiver.connect(job, engine="e", layout=layout_of(engine)) as receiver:
            sender.publish(1).wait()
            update = receiver.poll()
            assert update is not None
            update.stage()
            update.wait_staged()
            assert update.ready()
            update.commit()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, trainer.state_dict()[name].to(torch.bfloat16))


def test_what_happens_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bascule")
    server = bascule.CoordinatorServer.start(bascule.Job(name="logged", heartbeat=0.1))
    job = bascule.Job(name="logged", coordinator=server.address, heartbeat=0.1)
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    with bascule.WeightSender.connect(job, layout=layout):
        server.stop()
        end = time.monotonic() + 20
        while "does not answer" not in caplog.text and time.monotonic() < end:
            time.sleep(0.02)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert any(
        level == "WARNING" and line.startswith("trainer 0: the coordinator does not answer")
        for level, line in lines
    )
    warning = next(record for record in caplog.records if record.levelname == "WARNING")
    assert (warning.rank, warning.engine) == (0, None)  # type: ignore[attr-defined]
    assert any(
        level == "INFO" and line.startswith("coordinator: trainer 0 joined")
        for level, line in lines
    )
