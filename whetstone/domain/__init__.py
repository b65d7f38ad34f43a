"""Hold values and pure rules that several programs share.

`ids` names things, `api_keys` makes and hashes keys, `conversation_hash` defines how conversations are compared,
`why_not_trained` lists the reasons, `states` the states that policies, versions, groups, trajectories, steps and
feedback pass through, `reward_bounds` what a reward may be, `lineage` which versions descend from which, `stats` means
and intervals, `gains` by how much one version is better than another, `sampling_share` a stable share of names,
`suggestions` the nearest right name.
"""
