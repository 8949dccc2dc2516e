"""The mesh, against a layout written out by hand and against the definition of a process group on small worlds."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import build_run
from costmodel.cost.prices import axis_groups
from costmodel.mesh import EMBEDDING_AXIS, GRADIENT_AXIS, STATE_AXIS, Mesh, link_of, mesh_of, neighbours, seats
from costmodel.spec import PlanError, Run

SMALL = {"layers": 8, "hidden": 64, "heads": 8, "ffn": 192, "vocab": 128, "tied_embeddings": True}


def run_of(plan: dict[str, Any], gpus: int, per_node: int = 8, **changes: Any) -> Run:
    """A small model on any degrees; Megatron's dialect takes them all."""
    return build_run(model={**SMALL, **changes}, cluster={"gpu": "h100", "gpus": gpus, "gpus_per_node": per_node},
                     plan={"framework": "megatron", **plan}, recipe={"seq_len": 256})


def members(mesh: Mesh, axis: str) -> list[list[int]]:
    groups = mesh.groups_of(axis)
    return [list(groups.members(i)) for i in range(groups.count)]


def test_dp2_tp2_pp2_on_two_nodes_of_four_by_hand() -> None:
    """Node 0 holds ranks 0 to 3, stage 0; node 1 holds ranks 4 to 7, stage 1. tp neighbours are pairs, dp is two apart, pp crosses the nodes."""
    mesh = mesh_of(run_of({"tp": 2, "pp": 2}, 8, per_node=4))
    assert members(mesh, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(mesh, "dp_replicate") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(mesh, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [mesh.node(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.local_rank(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert mesh.coordinates(6) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 0}
    links = {g.axis: [(c.kind, c.groups) for c in g.crosses] for g in mesh.groups}
    assert links["tp"] == links["dp_replicate"] == [("nvlink", 4)]
    assert links["pp"] == [("infiniband", 4)]
    assert links["cp"] == []


def test_one_rank_knows_its_groups_its_place_and_its_neighbours() -> None:
    mesh = mesh_of(run_of({"tp": 2, "pp": 2}, 8, per_node=4, tied_embeddings=False))
    found = {s.axis: (list(s.members), s.place) for s in seats(mesh, 6)}
    assert found == {"pp": ([2, 6], 1), "dp_replicate": ([4, 6], 1), "dp_shard": ([6], 0), "cp": ([6], 0), "tp": ([6, 7], 0)}
    assert neighbours(mesh, 6) == (2, None)
    assert neighbours(mesh, 2) == (None, 6)
    assert mesh.data_index(6) == 1


def test_with_several_stages_a_rank_the_last_rank_sends_to_the_first() -> None:
    mesh = mesh_of(run_of({"pp": 4, "schedule": "interleaved", "virtual_stages": 2}, 8))
    assert mesh.stages == ((1, 1), (1, 1), (1, 1), (1, 1))
    assert neighbours(mesh, 0) == (6, 2)
    assert neighbours(mesh, 7) == (5, 1)


def test_sharded_state_spans_dp_shard_and_cp() -> None:
    """Ranks 0, 2, 4, 6 hold the four shards of tensor-parallel rank 0's weights: cp 2 x dp_shard 2."""
    mesh = mesh_of(run_of({"tp": 2, "cp": 2, "zero": 1}, 8))
    assert members(mesh, STATE_AXIS) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert members(mesh, "cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(mesh, "dp_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_whole_gradients_are_averaged_over_dp_replicate_and_cp() -> None:
    mesh = mesh_of(run_of({"tp": 2, "cp": 2}, 8))
    assert members(mesh, GRADIENT_AXIS) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_first_and_last_stage_share_a_tied_embedding() -> None:
    mesh = mesh_of(run_of({"tp": 2, "pp": 4}, 16))
    assert members(mesh, EMBEDDING_AXIS) == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert mesh.groups_of(EMBEDDING_AXIS).index_of(5) is None
    assert EMBEDDING_AXIS in {s.axis for s in seats(mesh, 13)}
    assert EMBEDDING_AXIS not in {g.axis for g in mesh_of(run_of({"pp": 4}, 16, tied_embeddings=False)).groups}


def test_uneven_groups_say_how_many_stay_in_a_node() -> None:
    """Four groups of six on three nodes of eight: 0-5 and 18-23 stay inside, 6-11 and 12-17 lie across."""
    mesh = mesh_of(run_of({"zero": 1, "dp_shard": 6, "dp_replicate": 4}, 24))
    groups = mesh.groups_of("dp_shard")
    assert [(c.kind, c.groups) for c in groups.crosses] == [("nvlink", 2), ("infiniband", 2)]
    kinds = [link_of(groups, groups.members(i)) for i in range(4)]
    assert [c.kind if c else "" for c in kinds] == ["nvlink", "infiniband", "infiniband", "nvlink"]


def factors(draw: st.DrawFn) -> Iterator[int]:
    for most in (4, 2, 4, 4, 4):
        yield draw(st.integers(1, most))


@st.composite
def worlds(draw: st.DrawFn) -> Run:
    tp, cp, shard, replicate, pp = factors(draw)
    per_node = draw(st.sampled_from([2, 3, 4, 8]))
    world = (2 ** (tp - 1)) * cp * shard * replicate * pp
    per_node = per_node if world % per_node == 0 else 1
    return run_of({"tp": 2 ** (tp - 1), "cp": cp, "dp_shard": shard, "dp_replicate": replicate, "pp": pp, "zero": 1}, world, per_node)


@given(worlds())
def test_a_group_is_the_ranks_that_differ_in_one_coordinate_alone(run: Run) -> None:
    mesh = mesh_of(run)
    ranks = range(mesh.world_size)
    at = [mesh.coordinates(r) for r in ranks]
    for axis in mesh.degrees:
        classes: dict[tuple[int, ...], list[int]] = {}
        for r in ranks:
            classes.setdefault(tuple(n for a, n in at[r].items() if a != axis), []).append(r)
        assert sorted(members(mesh, axis)) == sorted(classes.values())
    for groups in mesh.groups:
        for i in range(groups.count):
            assert all(groups.index_of(r) == i for r in groups.members(i))


@given(worlds())
def test_links_counted_by_period_are_those_counted_one_by_one(run: Run) -> None:
    mesh = mesh_of(run)
    for groups in mesh.groups:
        found = dict.fromkeys((c.level for c in groups.crosses), 0)
        for i in range(groups.count if groups.size > 1 else 0):
            link = link_of(groups, groups.members(i))
            assert link is not None
            found[link.level] += 1
        assert found == {c.level: c.groups for c in groups.crosses}


def test_groups_are_those_that_collectives_are_priced_on() -> None:
    run = run_of({"tp": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 2, "pp": 2, "zero": 1}, 32)
    mesh, priced = mesh_of(run), axis_groups(run)
    for axis, name in (("tp", "tp"), ("cp", "cp"), (STATE_AXIS, "dp_shard"), ("dp_replicate", "dp_replicate"), ("pp", "pp")):
        groups = mesh.groups_of(axis)
        assert (groups.size, groups.stride) == (priced[name].size, priced[name].stride)
        assert [c.level for c in groups.crosses] == [run.cluster.levels[priced[name].spans].name]


def test_a_hundred_thousand_gpus_cost_what_eight_do() -> None:
    run = run_of({"tp": 8, "pp": 5, "zero": 1}, 100_000)
    began = time.perf_counter()
    mesh = mesh_of(run)
    found = list(seats(mesh, 73_123))
    assert time.perf_counter() - began < 0.05
    assert mesh.groups_of("dp_shard").members(27)[1640] == 73_123
    assert [len(s.members) for s in found if s.axis == "dp_shard"] == [2500]


def test_what_does_not_exist_is_refused() -> None:
    mesh = mesh_of(run_of({"tp": 2}, 8))
    with pytest.raises(PlanError, match="the ranks are 0 to 7"):
        list(seats(mesh, 8))
    with pytest.raises(PlanError, match="no such axis"):
        mesh.groups_of("ep")
