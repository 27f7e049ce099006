"""The measurement of what a hostile tenant costs another one (benchmarks/hostile.py): it runs, and attacks as it says.

Its times are for ``python -m benchmarks.hostile`` on a quiet machine; nothing here depends on them.
"""

from __future__ import annotations

import re

import pytest

from benchmarks import hostile

pytestmark = pytest.mark.frameworks


def test_command_measures_a_pair_and_counts_the_answers_of_the_hostile_tenant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = hostile.main(["--pairs", "1", "--seconds", "1"])
    said = capsys.readouterr().out
    (ratio,) = re.findall(r"median ratio ([\d.]+)", said)
    (total,) = [line for line in said.splitlines() if line.startswith("Eve's ")]
    answers = {each: int(count.replace(",", "")) for count, each in re.findall(r"([\d,]+) x (\w+ \d+)", total)}
    refused = answers.get("new 429", 0)
    assert status == (float(ratio) > hostile.CEILING or not refused) or ratio == f"{hostile.CEILING:.2f}"
    # She attacks for a second more than Ann pays: 240 requests.
    assert total.startswith("Eve's 240 requests: ")
    assert (answers["new 201"] + refused, answers["large 413"], answers["odd 400"]) == (180, 20, 20)
    assert answers["guess 404"] + answers.get("guess 429", 0) == 20
    assert f"Eve's rows {answers['new 201']} (at most {hostile.CAP})" in said
    assert f"limits of a tenant: {hostile.RATE} new keys a second" in said


def test_hostile_tenant_sends_more_new_keys_than_her_rate_and_the_other_one_fewer() -> None:
    new = hostile.EVES_PER_SECOND * hostile.KINDS.count("new") // len(hostile.KINDS)
    assert hostile.ANNS_PER_SECOND < hostile.RATE < new
