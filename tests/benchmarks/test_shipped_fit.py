"""How the shipped profiles are written from a fit, and the published tables that it reads."""

import math

import pytest

from benchmarks.kernels import kernel_evidence
from benchmarks.profiles import PRIORS, rewritten
from calibrate.evidence import CollectiveEvidence, KernelEvidence
from calibrate.profiles import profile_text
from costmodel.catalog.profiles import DATA, Constant, constants_at, file_constants


def test_one_line_of_a_shipped_file_is_replaced_and_nothing_else() -> None:
    text = (DATA / "hardware" / "h100_sxm.toml").read_text(encoding="utf-8")
    new = Constant(0.5, "share", 0.02, "made", "fitted", "2026-11", "", "hardware.h100_sxm")
    changed = rewritten(text, "attention.fa2", "share", new)
    differ = [(a, b) for a, b in zip(text.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert len(differ) == 1
    assert differ[0][1] == 'share = {value = 0.5, unit = "share", log_sd = 0.02, basis = "fitted", source = "made", date = "2026-11"}'
    assert rewritten(changed, "attention.fa2", "share", new) == changed
    with pytest.raises(ValueError, match="no nothing in"):
        rewritten(text, "attention.fa2", "nothing", new)


def test_priors_are_constants_of_the_shipped_files() -> None:
    for (place, key), prior in file_constants(PRIORS).items():
        shipped = constants_at(place)[key]
        assert prior.unit == shipped.unit
        assert prior.log_sd > 0


def test_a_profile_s_text_reads_back() -> None:
    priors = file_constants(PRIORS)
    text = profile_text("again", ((key, c) for (_, key), c in priors.items()))
    path = PRIORS.parent / "priors.toml"
    assert text.split("\n", 1)[1] == path.read_text(encoding="utf-8").split("\n", 2)[2]


def test_published_tables_are_predicted_within_a_factor_of_two() -> None:
    """Units and conventions of the tables are the cost model's: a wrong one is off by more than that."""
    off, total = 0, 0
    for item in kernel_evidence():
        assert isinstance(item, KernelEvidence | CollectiveEvidence)
        for point, log in zip(item.points, item.log_predicted(item.profile), strict=True):
            total += 1
            off += abs(log - math.log(point.measured)) > math.log(2)
    assert total > 700
    assert off <= 0.01 * total
