"""Schedules that split backward, so that gradients of weights, for which no other rank waits, fill the bubble.

`zb-h1` is 1F1B with the gradients of weights deferred (arXiv 2401.10241, section 2: ZB-H1); `interleaved-zb` the same over v stages a rank,
p apart. `zbv` lays two stages a rank as a V, so that the last stage is on the first rank (section 6 of it); `dualpipev` fills both halves of
the V from the other (DeepSeek, github.com/deepseek-ai/DualPipe). The orders are those of torch.distributed.pipelining (2.13, schedules.py:
ScheduleInterleavedZeroBubble, which does zb-h1 where a rank has one stage; ScheduleZBVZeroBubble; ScheduleDualPipeV, whose overlapped pairs
run one after the other unless a user registers a function that overlaps them), action by action.
"""

from costmodel.program.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action


def split_order(schedule: str, p: int, v: int, m: int, rank: int) -> tuple[Action, ...]:
    """The actions of one rank, in order. p ranks, v stages a rank, m micro-batches."""
    if schedule == "zbv":
        return _zbv(p, m, rank)
    return _dualpipev(p, m, rank) if schedule == "dualpipev" else _zero_bubble(p, v, m, rank)


class _Order:
    """A rank's actions as they are written down; each pass of a stage takes its micro-batches in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: dict[tuple[str, int], int] = {}

    def run(self, kind: str, stage: int) -> int:
        """The stage's next micro-batch; a whole backward counts as both of its passes."""
        micro = self.done.get((INPUT if kind == BACKWARD else kind, stage), 0)
        self.actions.append(Action(kind, stage, micro))
        for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
            self.done[counted, stage] = self.done.get((counted, stage), 0) + 1
        return micro


def _zero_bubble(p: int, v: int, m: int, rank: int) -> tuple[Action, ...]:
    """Warm-up p - 1 - r + (v - 1)·(micro-batches a round); rank r is r gradients of weights behind those of inputs."""
    per_round, total = m // max(1, m // p), m * v
    warm = min((v - 1) * per_round + p - 1 - rank, total)
    order = _Order()

    def backward(kind: str, step: int) -> None:
        order.run(kind, (v - 1 - step // per_round % v) * p + rank)

    for step in range(total + warm):
        if step < total:
            order.run(FORWARD, step // per_round % v * p + rank)
        if step >= warm:
            backward(INPUT, step - warm)
            if step - warm >= rank:
                backward(WEIGHT, step - warm - rank)
    for step in range(max(0, total - rank), total):
        backward(WEIGHT, step)
    return tuple(order.actions)


def _zbv(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """The order of at least 2p - 1 micro-batches, less those that there are not."""
    count, down, up = max(2 * p - 1, m), rank, 2 * p - 1 - rank
    order = _Order()
    run = order.run
    for _ in range(2 * (p - rank) - 1):
        run(FORWARD, down)
    for _ in range(rank):
        run(FORWARD, up)
        run(FORWARD, down)
    for _ in range(p - rank):
        for kind in (FORWARD, INPUT, WEIGHT):
            run(kind, up)
    while order.done[FORWARD, up] < order.done[FORWARD, down] or order.done[FORWARD, down] < count:
        if order.done[FORWARD, down] < count:
            run(FORWARD, down)
        run(INPUT, down)
        run(WEIGHT, down)
        for kind in (FORWARD, INPUT, WEIGHT):
            run(kind, up)
    for _ in range(rank):
        run(INPUT, down)
        run(INPUT, up)
    for _ in range(p - rank):
        run(INPUT, down)
        run(WEIGHT, down)
    for stage in (up, down):
        for _ in range(order.done.get((WEIGHT, stage), 0), order.done[INPUT, stage]):
            run(WEIGHT, stage)
    return tuple(a for a in order.actions if a.micro < m)


def _dualpipev(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """Eight steps, numbered as torch numbers them; m is at least 2p."""
    down, up = rank, 2 * p - 1 - rank
    order, left = _Order(), p - rank - 1
    run = order.run
    waiting: list[int] = []

    def inputs(stage: int) -> None:
        run(INPUT, stage)
        waiting.append(stage)

    def weights() -> None:
        if waiting:
            run(WEIGHT, waiting.pop(0))

    for _ in range(2 * left):  # 1
        run(FORWARD, down)
    for _ in range(rank + 1):  # 2
        run(FORWARD, down)
        run(FORWARD, up)
    for _ in range(left):  # 3
        inputs(up)
        weights()
        run(FORWARD, up)
    for _ in range(m - 2 * p + rank + 1):  # 4
        for forward, backward in ((down, up), (up, down)):
            run(FORWARD, forward)
            run(BACKWARD, backward)
    for _ in range(left):  # 5
        run(BACKWARD, up)
        run(FORWARD, up)
        run(BACKWARD, down)
    half, splits = (rank + 1) // 2, False
    for i in range(rank + 1):  # 6
        splits = splits or (i == half and rank % 2 == 1)
        (inputs if splits else lambda s: run(BACKWARD, s))(up)
        splits = splits or (i == half and rank % 2 == 0)
        (inputs if splits else lambda s: run(BACKWARD, s))(down)
    for _ in range(left):  # 7
        weights()
        (inputs if splits else lambda s: run(BACKWARD, s))(down)
    for _ in range(rank + 1):  # 8
        weights()
    return tuple(order.actions)


IDLE, OPENS, ADDS, ANEW = "idle", "opens", "adds", "anew"
"""What a pass does with the gradients of its stage's weights. A second pass OPENS them, ADDS to what the one before left, or begins ANEW because a first pass
has taken that up since (FSDP2, into its own sum); a first pass finds nothing (IDLE), OPENS that sum, or ADDS to it."""


def words(order: tuple[Action, ...]) -> list[str]:
    """The word of every first and second pass in a rank's order; of other actions none."""
    return [word for word, _ in _history(order)]


def left_over(order: tuple[Action, ...]) -> dict[int, str]:
    """By stage: the word of a first pass, were there one more when all is done."""
    ends: dict[int, str] = {}
    for action, (_, after) in zip(order, _history(order), strict=True):
        ends[action.stage] = after
    return ends


def _history(order: tuple[Action, ...]) -> list[tuple[str, str]]:
    """Each action's word, and that of a first pass of its stage right after it."""
    pending: set[int] = set()
    summed: set[int] = set()
    out = []
    for kind, stage, _ in order:
        word = ""
        if kind == INPUT:
            word = IDLE if stage not in pending else ADDS if stage in summed else OPENS
            if stage in pending:
                pending.remove(stage)
                summed.add(stage)
        elif kind == WEIGHT:
            word = ADDS if stage in pending else ANEW if stage in summed else OPENS
        if kind in (WEIGHT, BACKWARD):
            pending.add(stage)
        out.append((word, IDLE if stage not in pending else ADDS if stage in summed else OPENS))
    return out
