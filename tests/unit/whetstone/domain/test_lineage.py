"""How versions descend from one another."""

from whetstone.domain.lineage import lineage


def test_the_lineage_leads_over_parents_to_the_base_model() -> None:
    assert lineage(5, {0: None, 1: 0, 2: 1, 5: 2, 4: 2}) == [5, 2, 1, 0]
