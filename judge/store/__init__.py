"""The judge's SQL: `unit_of_work`, with `groups` for placing and `ruler` for what judges are asked."""
