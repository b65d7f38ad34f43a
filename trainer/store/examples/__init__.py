"""Select, read and write in SQL what steps learn from beside rewards.

`sources` selects answers to imitate, `corrections` answers that words correct, `own_answers` answers that a teacher is
to score, `pairs` answers of another policy of which one is better. The words are feedback, a judge's (`explanations`),
or what followed the answer (`followups`). `answers` assigns them all to a step as its examples, and reads and writes
their token ids.
"""
