"""What `whetstone status` shows: `probes` looks at processes, the proxy and the disk, `store` at the database. From
these facts, `problems` says what is wrong; why no policy trains comes from `whetstone.doctor`. `view` formats all.
"""
