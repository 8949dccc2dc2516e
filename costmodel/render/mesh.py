"""A mesh as a text: the rank order, the groups of every axis and the link they cross, one rank's seats."""

from collections.abc import Sequence

from costmodel.mesh import SERVES, Crossing, Groups, Mesh, link_of, neighbours, seats
from costmodel.render.text import Page
from costmodel.render.units import plural, rate

SHOWN = 4
"""Members of a group that are written out where there are more: the first ones, and the last."""


def render_mesh(title: str, mesh: Mesh, page: Page, *, axis: str | None = None, rank: int | None = None, limit: int | None = None,
                default_limit: int = 16, notes: Sequence[str] = ()) -> str:
    """The whole text. axis, rank: only that; limit: rows of a list, None for the default, 0 for all."""
    page.line(title, "bold")
    rows = default_limit if limit is None else limit or mesh.world_size
    whole = limit == 0
    chosen = mesh.groups if axis is None else (mesh.groups_of(axis),)
    if rank is not None:
        _rank(mesh, rank, {g.axis for g in chosen}, whole, page)
    else:
        _order(mesh, page)
        _summary(mesh, chosen, page)
        for groups in chosen:
            if groups.size > 1 and (axis is not None or limit is not None or groups.count <= rows):
                _groups(mesh, groups, rows, whole, page)
        if axis is None:
            _ranks(mesh, rows, page)
    if notes:
        page.heading("NOTES")
        page.bullets(notes)
    return str(page)


def _order(mesh: Mesh, page: Page) -> None:
    page.heading("MESH", f"{plural(mesh.world_size, 'rank')} in {plural(mesh.nodes, 'node')} of {min(mesh.world_size, mesh.gpus_per_node)}")
    terms = [f"{mesh.strides[a]:,} x {a}" if mesh.strides[a] > 1 else a for a in mesh.degrees if mesh.degrees[a] > 1]
    page.pairs([("rank", f"= {' + '.join(terms) or '0'}, coordinates counted from 0"),
                ("node", f"= rank // {mesh.gpus_per_node}; local rank = rank % {mesh.gpus_per_node}, the device it drives"),
                ("world", f"all {mesh.world_size:,} ranks form the default process group, root 0" if mesh.world_size > 1 else "one rank, no group")])


def _summary(mesh: Mesh, chosen: Sequence[Groups], page: Page) -> None:
    page.heading("GROUPS", "ranks that differ in one coordinate alone; the lowest is the root")
    shown = SHOWN if mesh.world_size < 10_000 else SHOWN - 1
    rows = [[g.axis, f"{g.count:,}", f"{g.size:,}", spelt(g.members(0), shown), spelt(g.members(g.count - 1), shown) if g.count > 1 else "-"]
            for g in chosen if g.size > 1]
    if rows:
        page.table(["axis", "groups", "size", "first", "last"], rows, "<>><<")
        page.line()
        page.pairs([(g.axis, f"{_crossings(g, mesh)}: its ranks {SERVES[g.axis]}") for g in chosen if g.size > 1])
    alone = [g.axis for g in chosen if g.size == 1]
    if alone:
        if rows:
            page.line()
        page.line(f"degree 1, every rank alone: {', '.join(alone)}", indent="  ")


def spelt(members: range, shown: int = SHOWN) -> str:
    """Ranks of a group, the middle left out where there are many (0, 8, 16, …, 56); shown 0: all."""
    if not shown or len(members) <= shown:
        return ", ".join(str(r) for r in members)
    return ", ".join(str(r) for r in members[: shown - 1]) + f", …, {members[-1]}"


def _link(crossing: Crossing | None) -> str:
    return "-" if crossing is None else f"{crossing.kind} {rate(crossing.bytes_per_s)}"


def _crossings(groups: Groups, mesh: Mesh) -> str:
    parts = []
    for c in groups.crosses:
        where = "inside a node" if c.domain <= mesh.gpus_per_node else "between nodes"
        which = f" ({c.groups:,} of {groups.count:,} groups)" if len(groups.crosses) > 1 else ""
        parts.append(f"{_link(c)}, {where}{which}")
    return "; ".join(parts)


def _groups(mesh: Mesh, groups: Groups, rows: int, whole: bool, page: Page) -> None:
    page.heading(f"GROUPS OF {groups.axis}", SERVES[groups.axis])
    lines = []
    for index in range(min(rows, groups.count)):
        members = groups.members(index)
        lines.append([str(index), str(members[0]), _nodes(mesh, members), _link(link_of(groups, members)), spelt(members, 0 if whole else 2 * SHOWN)])
    page.table(["group", "root", "nodes", "link", "members"], lines, ">><<<")
    _left_out(groups.count - len(lines), "group", page)


def _nodes(mesh: Mesh, members: range) -> str:
    first, last = mesh.node(members[0]), mesh.node(members[-1])
    if members.step >= mesh.gpus_per_node and len(members) > 2 and first != last:
        return f"{len(members)} from {first} to {last}"
    return str(first) if first == last else f"{first}, {last}" if len(members) == 2 else f"{first} to {last}"


def _ranks(mesh: Mesh, rows: int, page: Page) -> None:
    page.heading("RANKS", "and their coordinates")
    axes = [a for a in reversed(mesh.degrees) if mesh.degrees[a] > 1]
    lines = []
    for rank in range(min(rows, mesh.world_size)):
        at = mesh.coordinates(rank)
        lines.append([str(rank), str(mesh.node(rank)), str(mesh.local_rank(rank)), *(str(at[a]) for a in axes)])
    page.table(["rank", "node", "local rank", *axes], lines, ">" * (3 + len(axes)))
    _left_out(mesh.world_size - len(lines), "rank", page)


def _left_out(more: int, what: str, page: Page) -> None:
    if more > 0:
        page.line(f"… and {plural(more, what)} more: --limit N, or --all; --rank R for one rank", "dim", "  ")


def _rank(mesh: Mesh, rank: int, axes: set[str], whole: bool, page: Page) -> None:
    found = [s for s in seats(mesh, rank) if s.axis in axes]
    at = mesh.coordinates(rank)
    page.heading(f"RANK {rank:,}", f"of {plural(mesh.world_size, 'rank')} in {plural(mesh.nodes, 'node')}")
    rows = [("node", f"{mesh.node(rank)}, local rank {mesh.local_rank(rank)} of {min(mesh.world_size, mesh.gpus_per_node)}"),
            ("coordinates", ", ".join(f"{axis} {at[axis]} of {mesh.degrees[axis]}" for axis in at)),
            ("data", f"share {mesh.data_index(rank)} of {mesh.degrees['dp_replicate'] * mesh.degrees['dp_shard']} of the global batch")]
    if mesh.degrees["pp"] > 1:
        numbers = mesh.numbers[at["pp"]]
        held = [f"stage {s} ({plural(n, 'layer')})" for s, n in zip(numbers, mesh.stages[at["pp"]], strict=True)]
        before, after = neighbours(mesh, rank)
        there = [f"receives from rank {before}" if before is not None else "reads the tokens",
                 f"sends to rank {after}" if after is not None else "hands on to itself" if mesh.folded else "computes the loss"]
        back = [f"on the way back sends to rank {before}" if before is not None else "computes the loss"] if mesh.folded else []
        rows += [("stages", ", ".join(held)), ("pipeline", "; ".join(there + back))]
    page.pairs(rows)
    page.line()
    page.table(["group", "size", "root", "its place", "link", "members"],
               [[f"{s.axis} #{s.index}", f"{len(s.members):,}", f"{s.members[0]}{' (itself)' if s.members[0] == rank else ''}", str(s.place),
                 _link(s.link), spelt_around(s.members, rank, whole)]
                for s in found if len(s.members) > 1], "<>>><<")
    alone = [s.axis for s in found if len(s.members) == 1]
    if alone:
        page.line()
        page.line(f"degree 1, alone: {', '.join(alone)}", indent="  ")


def spelt_around(members: range, rank: int, whole: bool = False) -> str:
    """As `spelt`, with the rank itself and its neighbours kept: 0, …, 95, [96], 97, …, 127."""
    at = members.index(rank)
    keep = sorted({0, 1, len(members) - 1, *range(max(0, at - 1), min(len(members), at + 2))}) if len(members) > 2 * SHOWN + 1 else range(len(members))
    if whole:
        keep = range(len(members))
    out, before = [], -1
    for i in keep:
        if i != before + 1:
            out.append("…")
        out.append(f"[{members[i]}]" if i == at else str(members[i]))
        before = i
    return ", ".join(out)
