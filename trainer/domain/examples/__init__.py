"""Hold what steps by example learn from.

`sft_examples` are answers to imitate, `corrections` words about an answer, `followups` words that followed it,
`own_answers` answers that a teacher scores.
"""
