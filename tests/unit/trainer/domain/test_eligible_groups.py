"""What a step may take."""

from datetime import UTC, datetime

from trainer.domain.eligible_groups import Candidate, CandidateMember

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_rows_of_one_group_become_one_candidate() -> None:
    rows = [
        ("a", NOW, "group", "t1", 1.0, 0, 0, 7, "", ""),
        ("a", NOW, "group", "t2", 0.0, 0, 1, 7, "", ""),
        ("b", NOW, None, "t3", 0.5, 1, 1, 7, "", ""),
        ("c", NOW, "baseline", "t4", 0.5, 1, 1, 7, "task", "user"),
    ]
    first, second, third = Candidate.grouped(rows)
    assert [member.trajectory_id for member in first.members] == ["t1", "t2"]
    assert second.members == (CandidateMember("t3", 0.5, 1, 1, 7),)
    assert [candidate.alone for candidate in (first, second, third)] == [False, False, True]
    assert (third.members[0].task, third.members[0].end_user) == ("task", "user")
