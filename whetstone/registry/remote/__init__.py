"""Bring adapters to machines that do not see the trainer's files, by an object store.

The trainer publishes a version in an `object_store`, its manifest last. A machine that loads it pulls it into a
`cache`, where it gets its name only when it is complete and verified. `puller` does that beside a vLLM server, for
proxies and trainers elsewhere. `sources` returns the folder that a server loads an adapter from, however it comes
there.
"""
