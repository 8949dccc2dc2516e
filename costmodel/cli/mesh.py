"""`costmodel mesh`: rank to node and coordinates, every process group, the link each crosses."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.options import Flag, Given, flag_value, takes_run
from costmodel.cli.screen import json_text, screen

if TYPE_CHECKING:
    from costmodel.mesh import Groups, Mesh
    from costmodel.spec import Run

SCHEMA = 1
DEFAULT_LIMIT = 16
_RANK, _LIMIT = Flag("--rank", "rank", "whole", ""), Flag("--limit", "limit", "whole", "")


@takes_run
def mesh(
    given: Given,
    axis: Annotated[str | None, typer.Option(metavar="WORD", show_default=False,
                                             help="Only the groups of this axis: tp, cp, dp_shard, dp_replicate, pp, ep or edp.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="R", show_default=False, help="Everything about one rank.")] = None,
    limit: Annotated[str | None, typer.Option(metavar="N", show_default=False, help=f"Rows of each list. Default: {DEFAULT_LIMIT}.")] = None,
    everything: Annotated[bool, typer.Option("--all", show_default=False, help="Every rank, group and member.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Show who sits where: rank, node, coordinates, process groups and the links they cross.

    Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate, and pp outermost.
    """
    from costmodel.mesh import mesh_of, seats
    from costmodel.spec import PlanError
    resolved = given.resolve()
    one = None if rank is None else int(flag_value(_RANK, rank))
    rows = None if limit is None else int(flag_value(_LIMIT, limit))
    if rows is not None and rows < 1:
        raise InputError(f"--limit {limit}: must be at least 1. Use --limit {DEFAULT_LIMIT}, or --all.")
    if everything and limit is not None:
        raise InputError(f"--limit {limit} and --all: --all has no limit. Give one of the two.")
    made = mesh_of(resolved.run)
    try:
        if axis is not None:
            made.groups_of(axis)
        if one is not None:
            next(seats(made, one))
    except PlanError as error:
        raise InputError(f"--{error.field} {error.value}: {error.rule} {error.fix.replace('rank = ', '--rank ')}") from None
    if as_json:
        data = document(made, axis=axis, rank=one, rows=made.world_size if everything else rows or DEFAULT_LIMIT, whole=everything)
        print(json_text(data), end="")
        return
    from costmodel.render.mesh import render_mesh
    from costmodel.render.prediction import title
    page = screen(resolved.run)
    print(render_mesh(title(resolved.run), made, page, axis=axis, rank=one, limit=0 if everything else rows, default_limit=DEFAULT_LIMIT,
                      notes=notes(resolved.run)), end="")


def notes(run: "Run") -> list[str]:
    """What the mesh does not show."""
    out = []
    if run.plan.single_process:
        out.append("DataParallel is one process: its GPUs are devices of rank 0, and there is no process group. The numbers here are device numbers.")
    if run.plan.ep > 1:
        out.append(f"Expert parallelism (ep {run.plan.ep}) adds no ranks: its groups, and those of ranks with the same experts (edp), divide the "
                   "data-parallel ones.")
    return out


def document(mesh: "Mesh", *, axis: str | None, rank: int | None, rows: int, whole: bool) -> dict[str, Any]:
    """A mesh as plain data with stable keys: docs/report.md. Ranks and groups beyond `rows` are left out, which `count` tells."""
    chosen = mesh.groups if axis is None else (mesh.groups_of(axis),)
    return {
        "schema": SCHEMA, "world_size": mesh.world_size, "nodes": mesh.nodes, "gpus_per_node": mesh.gpus_per_node,
        "axes": [{"axis": a, "degree": mesh.degrees[a], "stride": mesh.strides[a]} for a in mesh.degrees],
        "stages": [list(layers) for layers in mesh.stages],
        "groups": [_groups(g, rows, whole) for g in chosen],
        "ranks": [_seat(mesh, r) for r in range(min(rows, mesh.world_size))] if rank is None else [],
        "rank": None if rank is None else _rank(mesh, rank, {g.axis for g in chosen})}


def _groups(groups: "Groups", rows: int, whole: bool) -> dict[str, Any]:
    from costmodel.mesh import link_of
    listed = []
    for i in range(min(rows, groups.count)):
        members = groups.members(i)
        link = link_of(groups, members)
        listed.append({"group": i, "root": members[0], "last": members[-1], "members": list(members) if whole or len(members) <= rows else None,
                       "link": link.level if link else None})
    return {"axis": groups.axis, "count": groups.count, "size": groups.size, "stride": groups.stride,
            "links": [{"level": c.level, "kind": c.kind, "bytes_per_s": c.bytes_per_s, "domain": c.domain, "groups": c.groups} for c in groups.crosses],
            "listed": listed}


def _seat(mesh: "Mesh", rank: int) -> dict[str, Any]:
    return {"rank": rank, "node": mesh.node(rank), "local_rank": mesh.local_rank(rank), "coordinates": mesh.coordinates(rank),
            "data_index": mesh.data_index(rank)}


def _rank(mesh: "Mesh", rank: int, axes: set[str]) -> dict[str, Any]:
    from costmodel.mesh import neighbours, seats
    before, after = neighbours(mesh, rank)
    return {**_seat(mesh, rank), "receives_from": before, "sends_to": after,
            "groups": [{"axis": s.axis, "group": s.index, "root": s.members[0], "place": s.place, "members": list(s.members),
                        "link": s.link.level if s.link else None} for s in seats(mesh, rank) if s.axis in axes]}
