"""Select, read and write in SQL what steps learn from beside rewards.

`sources` selects answers to imitate, `corrections` answers that words correct, `own_answers` answers that a teacher is
to score. `answers` assigns them to a step as its examples, and reads and writes their token ids.
"""
