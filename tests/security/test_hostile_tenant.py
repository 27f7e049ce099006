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
    assert status == (float(ratio) > hostile.CEILING) or ratio == f"{hostile.CEILING:.2f}"
    answers = {int(code): int(count) for count, code in re.findall(r"(\d+) x (\d+)", said)}
    each = 2 * hostile.EVES_PER_SECOND // 4  # she attacks for a second more than Ann pays: 200 requests of four kinds
    lookups = 60
    assert answers.keys() <= {201, 400, 404, 413, 429}
    assert answers[201] == answers[400] == answers[413] == each
    assert answers.get(404, 0) + answers.get(429, 0) == each
    assert answers.get(404, 0) <= lookups
    assert f"Eve's rows {each} (at most {hostile.CAP})" in said
