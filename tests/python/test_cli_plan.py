"""``bascule plan``: shapes of models, worlds from descriptions, and what it tells."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import bascule
from bascule import _bascule
from bascule.cli import app
from bascule.cli._models import Model, known_models, load_model, make_model
from bascule.cli._transfer import Rates, Transfer, nodes_of, plan_transfer
from bascule.cli._worlds import Rollout, Trainer

# Parameters in billions as their makers give them, without layers for multi-token prediction.
PUBLISHED = {
    "qwen3-0.6b": 0.6,
    "qwen3-8b": 8.2,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "glm-4.5-air": 106.9,
    "glm-5.2": 744,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "gpt-oss-120b": 116.8,
    "qwen3-next-80b": 79.7,
}

SMALL_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 16,
}
SMALL_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}
SMALL_STACKED: dict[str, Any] = SMALL_DENSE | {"model_type": "gpt_oss", "num_local_experts": 8}


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def transfer(trainer: str, rollout: str, model: Model, **options: Any) -> Transfer:
    held, needed = Trainer.parse(trainer), Rollout.parse(rollout)
    per_node = options.pop("per_node", 8)
    colocated = options.pop("colocated", False)
    return plan_transfer(
        _bascule.World.from_json(held.world(model, "BF16")),
        _bascule.World.from_json(needed.world(model, "BF16")),
        nodes_of(held.ranks, needed.engines, needed.ranks, per_node, colocated=colocated),
        **options,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    assert load_model(name).elements / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    assert set(known_models()) == set(PUBLISHED)


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        ("LlamaConfig", {}),
        ("MistralConfig", {}),
        ("MixtralConfig", {"num_local_experts": 4}),
        ("Qwen2Config", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
        ("Qwen3Config", {"head_dim": 64}),
        ("Qwen3MoeConfig", {"num_experts": 4, "mlp_only_layers": [1]}),
        ("Glm4MoeConfig", {"head_dim": 64, "attention_bias": True, "use_qk_norm": True}),
        ("DeepseekV3Config", {"first_k_dense_replace": 2, "n_shared_experts": 2}),
        ("GlmMoeDsaConfig", {}),
        ("GptOssConfig", {"num_local_experts": 4}),
        ("Qwen3NextConfig", {}),
    ],
)
def test_tensors_are_those_of_transformers(config_class: str, fields: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(num_hidden_layers=4, **fields)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    ours = {t.name: t for t in make_model("m", config.to_dict()).tensors}
    # transformers stacks experts, checkpoints do not: compare how much there is of them.
    routed = {n for n, t in ours.items() if t.expert is not None}
    stacked = {n for n in theirs if ".mlp.experts." in n and n not in ours}
    assert sum(elements(ours[n].shape) for n in routed) == sum(elements(theirs[n]) for n in stacked)
    rename = {n: n.replace("block_sparse_moe", "mlp") for n in ours.keys() - routed}
    assert {rename[n]: ours[n].shape for n in rename} == {
        n: shape for n, shape in theirs.items() if n not in stacked
    }


def test_a_configuration_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MOE))
    assert load_model(str(tmp_path)) == load_model(str(tmp_path / "config.json"))
    assert load_model(str(tmp_path)).experts == 8
    for text, why in (
        ("{", "no JSON"),
        ("[]", "no configuration"),
        ('{"model_type": "eliza"}', "no shapes of model_type eliza"),
        ('{"model_type": "llama", "hidden_size": 1}', "lacks 'num_hidden_layers'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(typer.BadParameter, match=why):
            load_model(str(tmp_path))
    with pytest.raises(typer.BadParameter, match=r"known: qwen3-0\.6b"):
        load_model("no-such-model")


@pytest.mark.parametrize(
    ("text", "ranks", "copies_of_whole"),
    [
        ("fsdp:4", 4, 1),
        ("hsdp:2x4", 8, 2),
        ("flat:6", 6, 1),
        ("fsdp:4,ep:2", 4, 1),
        ("fsdp:2,pp:2", 4, 1),
        ("hsdp:2x2,ep:2,pp:2", 8, 2),
    ],
)
@pytest.mark.parametrize("config", [SMALL_MOE, SMALL_STACKED])
def test_trainers_hold_each_element_once_a_replica(
    config: dict[str, Any], text: str, ranks: int, copies_of_whole: int
) -> None:
    model = make_model("small", config)
    trainer = Trainer.parse(text)
    world = _bascule.World.from_json(trainer.world(model, "F32"))
    assert trainer.ranks == world.mesh.ranks == ranks
    held = sum(world.memory_of(rank)[0] for rank in range(ranks))
    assert held == model.elements * 4 * copies_of_whole


@pytest.mark.parametrize("text", ["fsdp:2,tp:2", "tp:2", "fsdp:2,tp:2,pp:2"])
def test_trainers_with_tensor_parallelism_repeat_what_it_does_not_cut(text: str) -> None:
    model = make_model("small", SMALL_MOE)
    world = _bascule.World.from_json(Trainer.parse(text).world(model, "F32"))
    whole = sum(elements(t.shape) for t in model.tensors if t.cut is None)
    held = sum(world.memory_of(rank)[0] for rank in range(world.mesh.ranks))
    assert held == (model.elements + whole) * 4


@pytest.mark.parametrize("config", [SMALL_MOE, SMALL_STACKED])
@pytest.mark.parametrize(
    ("text", "ranks", "dense_copies"),
    [("tp:2", 2, 1), ("ep:4", 4, 4), ("ep:8,tp:2", 8, 4), ("tp:2,pp:2", 4, 1)],
)
def test_engines_hold_what_their_parallelism_says(
    config: dict[str, Any], text: str, ranks: int, dense_copies: int
) -> None:
    model = make_model("small", config)
    rollout = Rollout.parse(text)
    world = _bascule.World.from_json(rollout.world(model, "BF16"))
    assert rollout.ranks == world.mesh.ranks == ranks
    routed = sum(elements(t.shape) for t in model.tensors if t.expert is not None or t.stacked)
    # A stacked tensor that tensor parallelism does not cut is on all of its ranks.
    uncut = sum(elements(t.shape) for t in model.tensors if t.cut is None and not t.stacked)
    uncut_routed = sum(elements(t.shape) for t in model.tensors if t.cut is None and t.stacked)
    dense_cut = model.elements - routed - uncut
    expected = dense_copies * (dense_cut + rollout.tp * uncut) + routed
    if rollout.ep == 1:
        expected += (rollout.tp - 1) * uncut_routed
    assert sum(world.memory_of(rank)[0] for rank in range(ranks)) == expected * 2


def test_pipeline_stages_are_in_order() -> None:
    model = make_model("small", SMALL_DENSE)
    document = json.loads(Rollout.parse("pp:4").world(model, "BF16"))
    stages = {t["name"]: t["placements"]["pp"]["at"] for t in document["tensors"]}
    assert stages["model.embed_tokens.weight"] == [0]
    assert [stages[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)] == [
        [0],
        [1],
        [2],
        [3],
    ]
    assert stages["model.norm.weight"] == stages["lm_head.weight"] == [3]


@pytest.mark.parametrize(
    ("trainer", "rollout", "why"),
    [
        ("fsdp", "tp:2", "none of fsdp:N, hsdp:RxS"),
        ("fsdp:4x2", "tp:2", "none of"),
        ("hsdp:4", "tp:2", "none of"),
        ("fsdp:0", "tp:2", "at least 1"),
        ("fsdp:4,fsdp:4", "tp:2", "twice"),
        ("fsdp:4,flat:4", "tp:2", "exclude"),
        ("flat:4,tp:2", "tp:2", "nothing else"),
        ("fsdp:4,tp:2,ep:2", "tp:2", "exclude"),
        ("fsdp:4,ep:3", "tp:2", "divide"),
        ("fsdp:4", "dp:2", "none of tp:N"),
        ("fsdp:4", "tp:3,ep:4", "divide"),
        ("fsdp:4", "ep:3", "does not divide"),
        ("fsdp:4", "pp:5", "fewer than pp"),
        ("fsdp:4,pp:5", "tp:2", "fewer than pp"),
    ],
)
def test_descriptions_that_make_no_sense(
    tmp_path: Path, trainer: str, rollout: str, why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MOE))
    done = run("--model", str(tmp_path), "--trainer", trainer, "--rollout", rollout)
    assert done.exit_code == 2
    assert why in " ".join(done.stderr.replace("│", " ").split())


def test_experts_of_a_dense_model() -> None:
    done = run("--model", "qwen3-0.6b", "--trainer", "fsdp:4", "--rollout", "ep:2")
    assert done.exit_code == 2
    assert "no routed experts" in " ".join(done.stderr.replace("│", " ").split())


def test_nodes() -> None:
    assert nodes_of(4, 2, 2, 8, colocated=False) == ([0] * 4, [[0, 0], [0, 0]])
    assert nodes_of(4, 2, 2, 4, colocated=False) == ([0] * 4, [[1, 1], [1, 1]])
    assert nodes_of(4, 1, 4, 2, colocated=True) == ([0, 0, 1, 1], [[0, 0, 1, 1]])
    assert nodes_of(4, 1, 4, 0, colocated=False) == ([0] * 4, [[0] * 4])


@pytest.mark.parametrize("per_node", [0, 2, 3, 8])
@pytest.mark.parametrize("colocated", [False, True])
def test_what_is_counted_adds_up(per_node: int, colocated: bool) -> None:
    model = make_model("small", SMALL_MOE)
    options = {"per_node": per_node, "colocated": colocated}
    planned = transfer("hsdp:2x4", "tp:2,ep:4,engines:3", model, **options)
    trainers = [rank for rank in planned.ranks if rank.engine is None]
    rollouts = [rank for rank in planned.ranks if rank.engine is not None]
    assert (len(trainers), len(rollouts)) == (8, 12)
    for index, rank in enumerate(planned.ranks):
        links_in = [link for link in planned.links if link.target == index]
        links_out = [link for link in planned.links if link.source == index]
        assert rank.fetches == sum(link.bytes for link in links_in)
        assert rank.serves == sum(link.bytes for link in links_out)
        assert rank.chunks == sum(link.chunks for link in links_in)
        assert rank.from_outside == sum(link.bytes for link in links_in if not link.same_node)
        assert all(
            link.same_node == (planned.ranks[link.source].node == rank.node) for link in links_in
        )
    for rank in rollouts:
        assert rank.fetches == rank.weights == rank.extra > 0
        # Who it reads from is a trainer or of its own engine.
        sources = {
            planned.ranks[link.source].engine
            for link in planned.links
            if planned.ranks[link.target] is rank
        }
        assert sources <= {None, rank.engine}
    assert all(rank.extra >= 2 * rank.weights > 0 for rank in trainers)
    # Engines that are placed alike are planned once: the same as each by itself.
    again = transfer("hsdp:2x4", "tp:2,ep:4,engines:3", model, **options, reuse=False)
    assert again.ranks == planned.ranks
    assert again.links == planned.links


def test_the_plan_is_that_of_a_session() -> None:
    """What ranks fetch in a real job, by peer, is what is planned for it."""
    rng = np.random.default_rng(3)
    source = {"w": rng.random((64, 48), np.float32), "v": rng.random(4096, np.float32)}
    mesh = bascule.layout.Mesh(["shard"], [2])
    job = bascule.Job(name="planned", token="secret")

    def cut(name: str, rank: int) -> Any:
        rows = source[name].shape[0] // 2
        return np.ascontiguousarray(source[name][rank * rows : (rank + 1) * rows])

    layouts = []
    with bascule.CoordinatorServer.start(job) as server:
        job = bascule.Job(name="planned", token="secret", coordinator=server.address)
        for rank in range(2):
            builder = bascule.LayoutBuilder(mesh, [rank])
            for name, array in source.items():
                tensor = bascule.layout.LogicalTensor(name, array.shape, bascule.layout.DType.F32)
                block = bascule.layout.Block.of(tensor, {"shard": bascule.layout.shard(0)})
                builder.add(block, cut(name, rank))
            layouts.append(builder.build())
        senders = [
            bascule.WeightSender.connect(job, rank=rank, world_size=2, layout=layouts[rank])
            for rank in range(2)
        ]
        publications = [sender.publish(1) for sender in senders]
        target = {name: np.zeros_like(array) for name, array in source.items()}
        layout = bascule.Layout.from_arrays(target)
        with bascule.WeightReceiver.connect(job, engine="e0", layout=layout) as receiver:
            publications[0].wait()
            update = receiver.poll()
            assert update is not None
            update.stage()
            update.wait_staged()
            assert update.ready()
            update.commit()
            report = update.report()
        for sender in senders:
            sender.close()
    planned = plan_transfer(
        _bascule.World.from_json(layouts[0].to_json()),
        _bascule.World.from_json(layout.to_json()),
        ([0, 0], [[0]]),
    )
    assert {link.peer: link.bytes for link in report.links} == {
        planned.ranks[link.source].name: link.bytes for link in planned.links
    }
    assert planned.ranks[2].fetches == report.bytes
    assert planned.ranks[0].extra == 2 * publications[0].report().bytes
    assert planned.ranks[2].extra <= report.peak_extra_bytes


def test_bound_and_what_is_missing_of_it() -> None:
    model = make_model("small", SMALL_DENSE)
    size = model.elements * 2
    one_node = transfer("fsdp:2", "tp:2", model, rates=Rates(memory=1000))
    uncut = 2 * sum(elements(t.shape) for t in model.tensors if t.cut is None)
    assert one_node.bound == {"memory": pytest.approx((2 * size + uncut) / 1000)}
    assert one_node.missing == []
    assert transfer("fsdp:2", "tp:2", model).missing == ["--memory-rate"]
    two = transfer("fsdp:2", "tp:1,engines:2", model, per_node=2, rates=Rates(egress=1000))
    assert two.missing == ["--memory-rate", "--ingress"]
    assert two.bound == {
        "sole_source": pytest.approx(size / 1000, rel=1e-6),
        "trainer_egress": pytest.approx(size / 1000, rel=1e-6),
        "all_egress": pytest.approx(size / 2000, rel=1e-6),
    }
    ingress = transfer("fsdp:2", "tp:1,engines:2", model, per_node=2, rates=Rates(ingress=500))
    assert ingress.bound == {"node_ingress": pytest.approx(size / 500, rel=1e-6)}


def test_as_text() -> None:
    done = run(
        *("--model", "qwen3-8b", "--trainer", "fsdp:64", "--rollout", "tp:8,engines:4"),
        *("--egress", "400Gbit", "--ingress", "50GB/s"),
    )
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert "64 trainers, 4 engines of 8, on 12 nodes" in text
    assert "engine e3 rank 7  most" in text
    assert "bound     328 ms at least, from node_ingress" in text
    assert "not counted: give --memory-rate" in text
    assert "one node only" in text
    assert len(text.splitlines()) < 30
    everything = run(
        *("--model", "qwen3-8b", "--trainer", "fsdp:64", "--rollout", "tp:8,engines:4"),
        *("--rows", "0"),
    ).stdout
    assert "trainer 63" in everything
    assert len(everything.splitlines()) > 64 + 32 + 2000


def test_as_json() -> None:
    arguments = ["--model", "qwen3-0.6b", "--trainer", "fsdp:4", "--rollout", "tp:2,engines:2"]
    told = json.loads(run(*arguments, "--memory-rate", "20GB", "--json").stdout)
    assert told["nodes"] == 1
    assert len(told["ranks"]) == 8
    fetched = [rank["fetches"] for rank in told["ranks"] if rank["engine"] == "e1"]
    links = [link for link in told["links"] if link["target"] == "engine e1 rank 0"]
    assert sum(link["bytes"] for link in links) == fetched[0]
    assert told["bound"]["binding"] == "memory"
    assert told["bound"]["seconds"] == told["bound"]["terms"]["memory"] > 0
    assert told["planner"]["prepare"] > 0
    unknown = json.loads(run(*arguments, "--json").stdout)["bound"]
    assert unknown == {
        "seconds": None,
        "binding": None,
        "terms": {},
        "missing": ["--memory-rate"],
    }


def test_of_two_files(tmp_path: Path) -> None:
    model = make_model("small", SMALL_MOE)
    held, needed = tmp_path / "trainers.json", tmp_path / "rollouts.json"
    held.write_text(Trainer.parse("fsdp:4").world(model, "BF16"))
    needed.write_text(Rollout.parse("tp:2").world(model, "BF16"))
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MOE))
    described = ["--model", str(tmp_path), "--trainer", "fsdp:4", "--rollout", "tp:2,engines:3"]
    by_file = json.loads(run(str(held), str(needed), "--engines", "3", "--json").stdout)
    by_description = json.loads(run(*described, "--json").stdout)
    assert by_file["links"] == by_description["links"]
    assert by_file["ranks"] == by_description["ranks"]


def test_of_layouts_of_single_ranks(tmp_path: Path) -> None:
    array = {"w": np.zeros((4, 8), np.float32)}
    layout = tmp_path / "layout.json"
    layout.write_text(bascule.Layout.from_arrays(array).to_json())
    told = json.loads(run(str(layout), str(layout), "--json").stdout)
    assert [rank["fetches"] for rank in told["ranks"]] == [0, 128]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "qwen3-8b"],
        ["--model", "qwen3-8b", "--trainer", "fsdp:2", "--rollout", "tp:2", "--engines", "2"],
        ["--model", "q", "--trainer", "fsdp:2", "--rollout", "tp:2", "--egress", "fast"],
        [__file__],
        ["no-such-file", __file__],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_errors_of_the_documents(tmp_path: Path) -> None:
    world = tmp_path / "world.json"
    other = tmp_path / "other.json"
    tensor = {"name": "w", "shape": [4], "dtype": "F32"}
    document = {"bascule_world": 1, "mesh": [], "tensors": [tensor]}
    world.write_text(json.dumps(document))
    for changed, why in (
        ({"tensors": [tensor | {"shape": [5]}]}, "tensor w"),
        ({"tensors": []}, "tensor w"),
        ({"tensors": [tensor, tensor | {"name": "x"}]}, "tensor x"),
        ({"bascule_world": 2}, "JSON: at $.bascule_world"),
        ({"bascule_world": None, "bascule_layout": 1}, "known are bascule_layout"),
    ):
        text = {key: v for key, v in (document | changed).items() if v is not None}
        other.write_text(json.dumps(text))
        done = run(str(world), str(other))
        assert done.exit_code == 1
        assert done.stdout == ""
        assert done.stderr.startswith("bascule plan: ")
        assert done.stderr.count("\n") == 1
        assert why in done.stderr


def test_list_models() -> None:
    assert "kimi-k2" in run("--list-models").stdout
    told = json.loads(run("--list-models", "--json").stdout)
    assert told["kimi-k2"]["experts"] == 384
