"""What `whetstone status` shows: `probes` looks at processes, the proxy and the disk, `store` at the database. From
these facts, `training` says why no policy trains at the moment, and `problems` what is wrong. `view` formats all of it.
"""
