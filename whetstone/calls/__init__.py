"""Read recorded calls as they come, for `whetstone tail` and the dashboard's live page: `store` has the SQL, `words`
the first words of a prompt."""
